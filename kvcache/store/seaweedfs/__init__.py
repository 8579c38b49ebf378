"""The store on SeaweedFS: blocks on many machines, two copies of each, expired by the volume servers themselves.

README.md says how it works and lists the files; store.py is the way in. Masters and volume servers are talked to
directly over HTTP; the filer is not used (it writes two to four times slower, spec/kv_tier.md). HTTP cannot list a
volume, so a scan needs the volume servers' gRPC side, which this folder must not import: whoever opens the store hands
in VolumeFiles (services/worker/tier/weed_volumes.py). Must not know the engine or requests.
"""
