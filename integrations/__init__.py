"""Adapters for libraries that call models their own way; installed as `swa_pass.integrations`.

One library a module, imported only by those who use that library: nothing here may be imported by the core.
"""
