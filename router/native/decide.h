// The best pair for one request. Formulas, their order of evaluation included, are those of router/balancers/prefill.py
// and decode.py, which stay the description; nothing here may be contracted into fused operations (build.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace headrace {

constexpr int kFields = 5;  // of work in flight (router/loads.py)
constexpr int kTokens = 0, kRequests = 2, kNanos = 3;
constexpr double kNano = 1e9;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Columns of a fleet, by rank number.
struct Tables {
    const int64_t* own;       // [numbers, kFields]
    const int64_t* since;     // [numbers, kFields]
    const int64_t* reported;  // [numbers, 3]
    const double* reported_at;
    const double* assigned;   // [numbers, 2]
};

// Ranks of one role.
struct Ranks {
    int64_t count;
    const int64_t* numbers;
    const int64_t* rows;
    const int64_t* slots;
    const int64_t* block_tokens;
    const int64_t* replica;
    int64_t replicas;
    const uint64_t* seeds;
    const double* slowness;
    const uint8_t* fits;
};

struct PrefillTerms {
    double per_new, per_hit, per_pair;              // work: seconds of each
    const double* grid_s;                           // alone: seconds at grid points
    int64_t grid_points;
    double grid_step;
    double grid_scale, alone_per_new;               // of the curve, and beside it
    double alone_per_hit, alone_with_hit, alone_scale;
    double host_delay, host_rate, shared_delay, shared_rate;
    double weight, idle_weight, attention_share, objective;
    double sample_token_s;
};

struct DecodeTerms {
    double base, per_request, per_token;  // ms of a step
    double usual_tokens, full;
};

struct Request {
    int64_t prompt_tokens, choices;
    double now, oldest, left;      // `oldest`: of a report that is believed; `left`: until the deadline
    uint64_t affinity;
    const int32_t* device;         // blocks by rank number
    const int32_t* local;          // null: as `device`
    const int32_t* mixed;          // null: no more than `local` and `shared`
    int64_t known;                 // length of these columns
    int64_t shared;
    const int32_t* pending;        // rank numbers that were sent the prompt's beginning a moment ago
    const int32_t* pending_depths; // so many blocks of it; a rank may stand in it several times
    int64_t pendings;
    // Answers. Rows are −1 where no rank can hold the request.
    int64_t prefill, decode;
    double cached, local_tokens, hit, work, load, ttft;
    double pace;                   // of the decode rank
    int64_t alone;                 // it would be the only request there
};

// rendezvous.weights
inline uint64_t mix(uint64_t key, uint64_t seed) {
    uint64_t x = seed ^ key;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline double pairs_of(double fresh, double hit) { return fresh * (hit + fresh / 2); }

inline double work_of(const PrefillTerms& terms, double fresh, double hit) {
    double seconds = fresh * terms.per_new;
    seconds = seconds + hit * terms.per_hit;
    return terms.per_pair != 0 ? seconds + terms.per_pair * pairs_of(fresh, hit) : seconds;
}

inline double alone_of(const PrefillTerms& terms, double fresh, double hit) {
    const double place = fresh / terms.grid_step;
    double curve;
    if (place >= static_cast<double>(terms.grid_points - 1)) {
        curve = terms.grid_s[terms.grid_points - 1];
    } else {
        const int64_t at = static_cast<int64_t>(place);
        const double slope = (terms.grid_s[at + 1] - terms.grid_s[at]) / terms.grid_step;
        curve = slope * (fresh - static_cast<double>(at) * terms.grid_step) + terms.grid_s[at];
    }
    double seconds = curve * terms.grid_scale;
    if (terms.alone_per_new != 0) seconds = seconds + fresh * terms.alone_per_new;
    if (terms.per_pair != 0) seconds = seconds + terms.per_pair * pairs_of(fresh, hit);
    return seconds + (hit * terms.alone_per_hit + terms.alone_with_hit * (hit > 0)) * terms.alone_scale;
}

inline double loading(double tokens, double delay, double rate) { return tokens > 0 ? delay + tokens / rate : 0.0; }

// What is in flight at a rank beside its report, or without one.
inline const int64_t* beside(const Tables& tables, int64_t number, bool fresh) {
    return (fresh ? tables.since : tables.own) + number * kFields;
}

struct Assessed {
    double cached, local, hit, work, load, ttft, cost;
    double weight;  // of its load
};

inline Assessed assess(const PrefillTerms& terms, const Request& request, int64_t number, int64_t block, int32_t soon) {
    const int64_t prompt = request.prompt_tokens;
    const double whole = static_cast<double>(prompt);
    const bool known = number < request.known;
    const auto tokens = [&](int64_t blocks) { return static_cast<double>(std::min(blocks * block, prompt)); };
    Assessed one{};
    one.cached = tokens(known ? request.device[number] : 0);
    if (soon > 0) one.cached = std::max(one.cached, tokens(soon));
    one.local = one.hit = one.cached;
    one.work = work_of(terms, whole - one.hit, one.hit);
    double from_host = 0.0;
    if (request.local != nullptr) {
        one.local = std::max(one.cached, tokens(known ? request.local[number] : 0));
        from_host = loading(one.local - one.cached, terms.host_delay, terms.host_rate);
        const double computed = work_of(terms, whole - one.local, one.local);
        if (computed + from_host < one.work + one.load) {
            one.hit = one.local;
            one.work = computed;
            one.load = from_host;
        }
    }
    if (request.shared != 0 || request.mixed != nullptr) {
        int64_t blocks = 0;
        if (known) {
            const int32_t* own = request.local != nullptr ? request.local : request.device;
            blocks = request.mixed != nullptr ? request.mixed[number] : std::max<int64_t>(own[number], request.shared);
        }
        const double reach = std::max(one.local, tokens(blocks));
        const double seconds = loading(reach - one.local, terms.shared_delay, terms.shared_rate) + from_host;
        const double computed = work_of(terms, whole - reach, reach);
        if (computed + seconds < one.work + one.load) {
            one.hit = reach;
            one.work = computed;
            one.load = seconds;
        }
    }
    return one;
}

constexpr double kTie = 1e-3;  // prefill.TIE

inline void choose_prefill(const Tables& tables, const Ranks& ranks, const PrefillTerms& terms, Request& request) {
    static thread_local std::vector<Assessed> all;
    static thread_local std::vector<int32_t> soon;
    request.prefill = -1;
    all.resize(ranks.count);
    for (int64_t at = 0; at < request.pendings; ++at) {
        const size_t number = request.pending[at];
        if (soon.size() <= number) soon.resize(number + 1, 0);
        soon[number] = std::max(soon[number], request.pending_depths[at]);
    }
    double per_pair = 0.0;
    if (terms.attention_share != 0) {
        double seconds = 0.0, attention = 0.0;
        for (int64_t at = 0; at < ranks.count; ++at) {
            seconds += tables.assigned[2 * ranks.numbers[at]];
            attention += tables.assigned[2 * ranks.numbers[at] + 1];
        }
        if (attention > 0) per_pair = terms.attention_share * seconds / attention;
    }
    double least_load = kInfinity, latest = 0.0;
    for (int64_t at = 0; at < ranks.count; ++at) {
        const int64_t number = ranks.numbers[at];
        const bool fresh = tables.reported_at[number] >= request.oldest;
        const int64_t* own = beside(tables, number, fresh);
        Assessed& one = all[at] = assess(terms, request, number, ranks.block_tokens[at],
                                         static_cast<size_t>(number) < soon.size() ? soon[number] : 0);
        const double* assigned = tables.assigned + 2 * number;
        double load = assigned[0];
        if (per_pair != 0) load = (1 - terms.attention_share) * assigned[0] + per_pair * assigned[1];
        load = ranks.slowness[at] * load;
        one.cost = load;  // completed below, when the least is known
        if (ranks.fits[at]) least_load = std::min(least_load, load);
        const double queue = static_cast<double>(own[kNanos]) / kNano;
        int64_t tokens = own[kTokens], requests = own[kRequests];
        if (fresh) {
            tokens += tables.reported[3 * number];
            requests += tables.reported[3 * number + 1];
        }
        const double waiting = std::max(queue, static_cast<double>(tokens) * terms.sample_token_s);
        const bool idle = waiting <= 0 && requests <= 0 && tables.own[number * kFields + kRequests] <= 0;
        one.weight = idle ? terms.idle_weight : terms.weight;
        const double alone = alone_of(terms, static_cast<double>(request.prompt_tokens) - one.hit, one.hit);
        one.ttft = one.load + ranks.slowness[at] * (waiting + alone);
        latest = std::max(latest, one.ttft);
    }
    for (int64_t at = 0; at < request.pendings; ++at) soon[request.pending[at]] = 0;
    const bool some_late = latest > std::min(terms.objective, request.left);
    const auto lateness = [&](const Assessed& one) {
        return !some_late ? 0 : one.ttft > request.left ? 2 : one.ttft > terms.objective ? 1 : 0;
    };
    int on_time = 3;
    for (int64_t at = 0; at < ranks.count; ++at) {
        all[at].cost = all[at].work + all[at].load + all[at].weight * (all[at].cost - least_load);
        if (ranks.fits[at]) on_time = std::min(on_time, lateness(all[at]));
    }
    const auto stands = [&](int64_t at) { return ranks.fits[at] && lateness(all[at]) == on_time; };
    int64_t least = -1;
    for (int64_t at = 0; at < ranks.count; ++at)
        if (stands(at) && (least < 0 || all[at].cost < all[least].cost)) least = at;
    if (least < 0) return;
    const double bound = all[least].cost + kTie * all[least].work;
    int64_t best = -1;
    uint64_t best_weight = 0;
    for (int64_t at = 0; at < ranks.count; ++at) {
        if (!stands(at) || !(all[at].cost <= bound)) continue;
        const uint64_t weight = mix(request.affinity, ranks.seeds[at]);
        if (best < 0 || weight > best_weight) best = at, best_weight = weight;
    }
    const Assessed& chosen = all[best];
    request.prefill = best;
    request.cached = chosen.cached;
    request.local_tokens = chosen.local;
    request.hit = chosen.hit;
    request.work = chosen.work;
    request.load = chosen.load;
    request.ttft = chosen.ttft;
}

inline double step_of(const DecodeTerms& terms, double requests, double tokens) {
    return (terms.base + terms.per_request * requests + terms.per_token * tokens) / 1000;
}

struct Projected {
    double requests, step, pace;
    bool full;
};

// `ahead`: seconds until the first token arrives.
inline void choose_decode(const Tables& tables, const Ranks& ranks, const DecodeTerms& terms, double ahead,
                          Request& request) {
    static thread_local std::vector<Projected> all;
    static thread_local std::vector<double> slowest;
    request.decode = -1;
    all.resize(ranks.count);
    const double choices = static_cast<double>(request.choices);
    const bool shared_steps = ranks.replicas < ranks.count;
    if (shared_steps) slowest.assign(ranks.replicas, 0.0);
    for (int64_t at = 0; at < ranks.count; ++at) {
        const int64_t number = ranks.numbers[at];
        const bool fresh = tables.reported_at[number] >= request.oldest;
        const int64_t* own = beside(tables, number, fresh);
        const int64_t* told = tables.reported + 3 * number;
        const int64_t mine = tables.own[number * kFields + kRequests];
        double requests = static_cast<double>(std::max(own[kRequests] + (fresh ? told[1] : 0), mine));
        double tokens = static_cast<double>(own[kTokens] + (fresh ? told[0] : 0));
        const double slow = ranks.slowness[at];
        if (ahead != 0) {
            const double waiting = static_cast<double>(own[kRequests] + (fresh ? told[2] : 0));
            const double running = std::max(0.0, requests - waiting);
            const double share = requests > 0 ? running / requests : 0.0;
            const double step = slow * step_of(terms, requests, tokens);
            const double left = std::exp(-ahead / std::max(1e-3, terms.usual_tokens * step));
            const double grown = running * left * ahead / step;
            requests = requests - running * (1 - left);
            tokens = tokens * (1 - share * (1 - left)) + grown;
        }
        const int64_t block = ranks.block_tokens[at];
        const int64_t rows = (request.prompt_tokens + block) / block + request.choices - 1;  // ⌈(prompt + 1)/block⌉
        requests = requests + choices;
        tokens = tokens + static_cast<double>(block * rows);
        Projected& one = all[at];
        one.requests = requests;
        one.step = one.pace = slow * step_of(terms, requests, tokens);
        if (shared_steps) {
            const double without =
                slow * step_of(terms, requests - choices, tokens - static_cast<double>(request.prompt_tokens));
            double& worst = slowest[ranks.replica[at]];
            worst = std::max(worst, without);
        }
        const double room = terms.full * static_cast<double>(ranks.rows[at]) * static_cast<double>(block);
        one.full = tokens > room || (ranks.slots[at] > 0 && requests > static_cast<double>(ranks.slots[at]));
    }
    if (shared_steps)
        for (int64_t at = 0; at < ranks.count; ++at) all[at].pace = std::max(all[at].step, slowest[ranks.replica[at]]);
    bool room = false;
    for (int64_t at = 0; at < ranks.count && !room; ++at) room = ranks.fits[at] && !all[at].full;
    int64_t best = -1;
    uint64_t best_weight = 0;
    for (int64_t at = 0; at < ranks.count; ++at) {
        if (!ranks.fits[at] || (room && all[at].full)) continue;
        if (best >= 0) {
            const Projected &one = all[at], &other = all[best];
            if (one.pace > other.pace || (one.pace == other.pace && one.step > other.step)) continue;
            if (one.pace == other.pace && one.step == other.step) {
                const uint64_t weight = mix(request.affinity, ranks.seeds[at]);
                if (best_weight == 0) best_weight = mix(request.affinity, ranks.seeds[best]);
                if (weight <= best_weight) continue;
                best = at, best_weight = weight;
                continue;
            }
        }
        best = at, best_weight = 0;
    }
    if (best < 0) return;
    request.decode = best;
    request.pace = all[best].pace;
    request.alone = all[best].requests <= choices;
}

}  // namespace headrace
