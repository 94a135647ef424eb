"""Tests of the whole: a real mount, a real journal, real stores, real frameworks, and kill -9."""
