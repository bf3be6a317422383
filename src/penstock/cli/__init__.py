"""The command line: `penstock run`, `penstock plugins`.

    documents  the YAML file as plain values, and `--set`
    catalogue  which stage a name means
    values     one value from the file for one parameter
    arguments  all values of a stage, checked against its signature
    spec       the whole file -> a Pipeline, with every problem said at once
    fitting    the first pass that scalers and encoders learn from
    exits      errors as a line on stderr and an exit code

The verbs are one module each: `run`, `plugins`; `main` puts them together.
"""
