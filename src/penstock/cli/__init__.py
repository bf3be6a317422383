"""The command line.

    catalogue  which stage a name means
    values     one value from the file for one parameter
    arguments  all values of a stage, checked against its signature
    spec       the whole file -> a Pipeline, with every problem said at once
    fitting    the first pass that scalers and encoders learn from
    loading    a file or a store -> a loader
    tokens     tokens on the screen, by what they are for
    exits      errors as a line on stderr and an exit code

The verbs are one module each: `run`, `plugins`, `prepare`, `show` (and `show_step`), `lint`, `info`, `plan`, `trace`,
`verify_resume`, `probe_isolation`, `bench`; `main` puts them together.
"""
