// The prefix index asked for one prompt: router/index/match.py says the same in Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace headrace {

constexpr uint32_t kRun = 1u << 31;  // words from here on name a run (router/index/runs.py)
constexpr int kClassShift = 27;
constexpr uint32_t kOffsetMask = (1u << kClassShift) - 1;
constexpr int kTierBits = 2;
constexpr uint32_t kDevice = 1, kHost = 2;
constexpr int kKeyBytes = 32;
constexpr int64_t kTogether = 32;  // keys whose memory is fetched at once

// Columns of a BlockIndex. Python keeps the pointers current.
struct IndexColumns {
    const int32_t* places;
    uint64_t mask;
    const uint64_t* low;
    const uint64_t* high;
    const uint32_t* words;
    uint32_t* ticks;
    const uint16_t* arena;
};

struct Prompt {
    const uint8_t* keys;    // kKeyBytes each
    int64_t count;
    int64_t stored;         // leading blocks that the store has
    const uint8_t* lent;    // snapshots: [count + 1], whether the store has the one behind so many blocks
    int64_t tick;           // of the first key (router/index/recency.py)
    int64_t ranks;          // length of the columns below
    int32_t* device;
    int32_t* local;
    int32_t* mixed;
    int64_t shared;
    int64_t longest;        // of all answers
    int64_t same;           // `local` says no more than `device`
    int64_t further;        // `mixed` says more than `local` and `shared`
};

struct Holders {
    const uint16_t* begin;
    const uint16_t* end;
};

// holder << 2 | tiers of everyone in a word; `single` is room for a word without a run.
inline Holders holders_of(const IndexColumns& index, uint32_t word, uint16_t* single) {
    if (word < kRun) {
        *single = static_cast<uint16_t>(word);
        return {single, single + (word != 0)};
    }
    const uint16_t* run = index.arena + (static_cast<uint64_t>(word & kOffsetMask) << 1);
    const uint16_t* end = run + (1u << ((word >> kClassShift) & 15));
    while (end > run && end[-1] == 0) --end;  // packed at the front
    return {run, end};
}

inline int32_t find(const IndexColumns& index, uint64_t low, uint64_t high) {
    uint64_t place = low & index.mask;
    for (;;) {
        const int32_t entry = index.places[place];
        if (entry < 0 || (index.low[entry] == low && index.high[entry] == high)) return entry;
        place = (place + 1) & index.mask;
    }
}

// Words of the keys in order, until one that nobody has behind the first `needed`; those that somebody has are used.
inline void look(const IndexColumns& index, const Prompt& prompt, int64_t needed, std::vector<uint32_t>& words) {
    words.clear();
    for (int64_t begin = 0; begin < prompt.count; begin += kTogether) {
        const int64_t end = std::min(prompt.count, begin + kTogether);
        uint64_t low[kTogether], high[kTogether];
        for (int64_t at = begin; at < end; ++at) {
            std::memcpy(&low[at - begin], prompt.keys + at * kKeyBytes, 8);
            std::memcpy(&high[at - begin], prompt.keys + at * kKeyBytes + 8, 8);
            __builtin_prefetch(index.places + (low[at - begin] & index.mask));
        }
        for (int64_t at = begin; at < end; ++at) {
            const int32_t entry = index.places[low[at - begin] & index.mask];
            if (entry < 0) continue;
            __builtin_prefetch(index.low + entry);
            __builtin_prefetch(index.high + entry);
            __builtin_prefetch(index.words + entry);
            __builtin_prefetch(index.ticks + entry, 1);
        }
        for (int64_t at = begin; at < end; ++at) {
            const int32_t entry = find(index, low[at - begin], high[at - begin]);
            const uint32_t word = entry < 0 ? 0 : index.words[entry];
            if (word != 0) {
                index.ticks[entry] = static_cast<uint32_t>(prompt.tick - at);
            } else if (at >= needed) {
                return;
            }
            words.push_back(word);
        }
    }
}

inline void summarise(Prompt& prompt) {
    prompt.same = 1;
    prompt.further = 0;
    prompt.longest = prompt.shared;
    for (int64_t rank = 0; rank < prompt.ranks; ++rank) {
        const int32_t local = prompt.local[rank], mixed = prompt.mixed[rank];
        if (prompt.device[rank] != local) prompt.same = 0;
        if (mixed > std::max<int64_t>(local, prompt.shared)) prompt.further = 1;
        prompt.longest = std::max<int64_t>(prompt.longest, mixed);
    }
}

// How far everybody gets: `device` and `local` must be zero. A block is scarce when nobody can lend it; a rank gets to
// the first scarce block that it does not have (`mixed`).
inline void match_blocks(const IndexColumns& index, Prompt& prompt) {
    static thread_local std::vector<uint32_t> words;
    static thread_local std::vector<int32_t> scarce;
    look(index, prompt, prompt.stored, words);
    const int64_t looked = static_cast<int64_t>(words.size());  // blocks up to the first that nobody has
    prompt.shared = 0;
    scarce.clear();
    std::memset(prompt.mixed, 0, sizeof(int32_t) * prompt.ranks);  // scarce blocks that a rank has, until the end
    int64_t alive = prompt.ranks;
    int64_t reached = looked;
    for (int64_t at = 0; at < looked; ++at) {
        uint16_t single;
        const Holders held = holders_of(index, words[at], &single);
        bool lent = at < prompt.stored;
        for (const uint16_t* one = held.begin; one != held.end; ++one) {
            const int64_t rank = *one >> kTierBits;
            if (prompt.local[rank] == at) prompt.local[rank] = static_cast<int32_t>(at + 1);
            if ((*one & kDevice) && prompt.device[rank] == at) prompt.device[rank] = static_cast<int32_t>(at + 1);
            lent |= (*one & kHost) != 0;
        }
        if (lent) {
            if (scarce.empty()) prompt.shared = at + 1;
            continue;
        }
        const int32_t before = static_cast<int32_t>(scarce.size());
        scarce.push_back(static_cast<int32_t>(at));
        alive = 0;
        for (const uint16_t* one = held.begin; one != held.end; ++one) {
            int32_t& have = prompt.mixed[*one >> kTierBits];
            if (have == before) {
                have = before + 1;
                ++alive;
            }
        }
        if (alive == 0) {
            reached = at;
            break;
        }
    }
    scarce.push_back(static_cast<int32_t>(reached));
    for (int64_t rank = 0; rank < prompt.ranks; ++rank) prompt.mixed[rank] = scarce[prompt.mixed[rank]];
    summarise(prompt);
}

// From blocks to what is usable as a whole: `keys` are those of the snapshots behind the first `longest` blocks.
inline void match_snapshots(const IndexColumns& index, Prompt& prompt) {
    static thread_local std::vector<uint32_t> words;
    static thread_local std::vector<int32_t> device, local, mixed, behind;
    look(index, prompt, prompt.count, words);
    const int64_t ranks = prompt.ranks;
    device.assign(prompt.device, prompt.device + ranks);
    local.assign(prompt.local, prompt.local + ranks);
    mixed.assign(prompt.mixed, prompt.mixed + ranks);
    std::memset(prompt.device, 0, sizeof(int32_t) * ranks);
    std::memset(prompt.local, 0, sizeof(int32_t) * ranks);
    std::memset(prompt.mixed, 0, sizeof(int32_t) * ranks);
    behind.assign(prompt.count + 1, 0);  // the last snapshot that can be lent, at most so many blocks in
    for (int64_t at = 0; at < prompt.count; ++at) {
        const int32_t end = static_cast<int32_t>(at + 1);
        uint16_t single;
        const Holders held = holders_of(index, words[at], &single);
        bool lent = prompt.lent[end] != 0;
        for (const uint16_t* one = held.begin; one != held.end; ++one) {
            const int64_t rank = *one >> kTierBits;
            if (end <= mixed[rank]) prompt.mixed[rank] = end;
            if (end <= local[rank]) prompt.local[rank] = end;
            if ((*one & kDevice) && end <= device[rank]) prompt.device[rank] = end;
            lent |= (*one & kHost) != 0;
        }
        behind[end] = lent ? end : behind[at];
    }
    for (int64_t rank = 0; rank < ranks; ++rank) prompt.mixed[rank] = std::max(prompt.mixed[rank], behind[mixed[rank]]);
    prompt.shared = behind[prompt.shared];
    summarise(prompt);
}

}  // namespace headrace
