"""The `penstock` command: one module per command, and what commands share.

    main           the commands
    completion     their options, for the shell
    options        shared options, and the decorator of every command
    advice         errors in the words of the command line
    console        output, tables, errors and exit codes
    pipeline_file  the YAML file of `penstock run`

A new command is a module with a function decorated by `options.command`, and a line in `main`.
"""
