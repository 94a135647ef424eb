"""Generations: presets of what frameworks write, where a generation lies, when a save of it is complete.

    presets.py, catalog.py   the fields of a preset; the built-in presets, AUTO, select()
    placement.py             path -> generation, by names alone
    detector.py              the state machine over all open saves; actions.py is what it says and asks
    ledger.py, saves.py      its memory: open and closed saves, open files
    signals.py, verdict.py   which event is a signal; may this save close now?
    completeness.py          format checks of files and generations

All of these are pure: no I/O, no clock.
"""
