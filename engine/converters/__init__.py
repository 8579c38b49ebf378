"""Writers of model folders: other formats re-expressed as Hugging Face folders that engine/loading.py reads.

Imported by the CLI lazily. Knows files and tensors; nothing of requests or services.
"""
