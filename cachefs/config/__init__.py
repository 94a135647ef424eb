"""The configuration: one TOML file, `CACHEFS_<KEY>` variables and flags, in that rising order of precedence.

    file, environment, flags ─► given(): each value by itself ─► load(): what is required, what fits together ─► Config

schema.py     the one table that everything else is made from: the fields of Config, with their bounds, units and help
values.py     what the text of one value means: sizes, durations, stores, addresses
load.py       given() and load()
__main__.py   prints the README's table of keys, or one key of a file
"""
