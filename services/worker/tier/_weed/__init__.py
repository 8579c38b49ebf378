"""Generated from volume_server.proto beside this file. It is SeaweedFS's contract, not ours, so it stands outside proto/.

Regenerate, from the top of the repository:
    python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \\
        headrace/services/worker/tier/_weed/volume_server.proto
"""
