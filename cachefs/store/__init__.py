"""Object stores behind one protocol (base.py): S3, a directory, memory; and the probe that finds out what a store
honours.
"""
