"""Generations: presets of what frameworks write, where a generation lies, when a save of it is complete.

Pure, no I/O and no clock:

    presets.py, catalog.py   the fields of a preset; the built-in presets, AUTO, select()
    placement.py             path -> generation, by names alone
    detector.py              the state machine over all open saves; actions.py is what it says and asks
    ledger.py, saves.py      its memory: open and closed saves, open files
    signals.py, verdict.py   which event is a signal; may this save close now?
    completeness.py          format checks of files and generations

With effects, in the journal and in the pins:

    tracker.py               tells the detector of changes, time, closes by hand; view.py shows it the tree
    effects.py, tracked.py   carry out its actions; what is kept of each save
    closing.py, early.py     pin a save at its close; pin finished files before it, so that their uploads start
    stager.py                from closed to `staged`: sync and identity
"""
