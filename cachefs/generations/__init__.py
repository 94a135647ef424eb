"""Generations: presets of what frameworks write, where a generation lies, when a save of it is complete.

    presets.py       the fields of a preset                     catalog.py    the built-in presets, AUTO, select()
    placement.py     path -> generation                         actions.py    what the detector says, and what it asks
    detector.py      the state machine over all open saves      completeness.py  format checks of files and generations
    saves.py         one save's state; the open files           signals.py    may this save close now?

All pure but tracker.py: no I/O, no clock.
"""
