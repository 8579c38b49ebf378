"""The command line: headrace …, for users and operators.

`main` names the commands; each lives in its own module and imports what it needs when it runs, so that
`headrace --help` loads neither grpc nor torch. `local_cluster` is the launcher that `headrace up`, the demo, the
benches and the tests share; `client` speaks to a router.
"""
