"""Adapters for libraries that call models their own way; installed as `swa_pass.integrations`.

One library a module, imported only by those who use that library: the core imports one of them when it is given a model
of that library, never before.
"""
