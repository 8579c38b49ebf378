// Entries of the library. One thread at a time; every pointer belongs to Python and outlives the call.
#include "decide.h"
#include "index.h"

using namespace headrace;

extern "C" {

int64_t headrace_router_sizes(int64_t which) {
    switch (which) {
        case 0: return sizeof(IndexColumns);
        case 1: return sizeof(Prompt);
        case 2: return sizeof(Tables);
        case 3: return sizeof(Ranks);
        case 4: return sizeof(PrefillTerms);
        case 5: return sizeof(DecodeTerms);
        case 6: return sizeof(Request);
    }
    return -1;
}

void headrace_match_blocks(const IndexColumns* index, Prompt* prompt) { match_blocks(*index, *prompt); }

void headrace_match_snapshots(const IndexColumns* index, Prompt* prompt) { match_snapshots(*index, *prompt); }

void headrace_choose_pair(const Tables* tables, const Ranks* prefill, const PrefillTerms* prefill_terms,
                          const Ranks* decode, const DecodeTerms* decode_terms, Request* request) {
    request->decode = -1;
    choose_prefill(*tables, *prefill, *prefill_terms, *request);
    if (request->prefill < 0) return;
    // As (now + ttft) − now in Python: the moment is what is handed on.
    const double arrives = request->now + request->ttft;
    choose_decode(*tables, *decode, *decode_terms, std::max(0.0, arrives - request->now), *request);
}
}
