"""Generated from rpc.proto beside this file. It is etcd's contract, not ours, so it stands outside proto/ and its lint.

Regenerate, from the top of the repository:
    python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \\
        headrace/services/runtime/registry/_etcd/rpc.proto
"""
