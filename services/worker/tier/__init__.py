"""The side of the cache tier that speaks gRPC or lives on the event loop; the tiers themselves are in kvcache/."""
