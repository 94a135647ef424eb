"""cachefs: a write-back cache file system for training checkpoints. See ARCHITECTURE.md."""

__version__ = "0.1.0"
