// Records on their way to the disk, without Python's interpreter lock: payloads copied, headers stamped, runs written.

#include <sys/uio.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

extern "C" {

// Of Python's stable ABI, as every version since 3.11 has it: no headers are needed to compile this.
struct Py_buffer {
    void *buf;
    void *obj;
    ssize_t len, itemsize;
    int readonly, ndim;
    char *format;
    ssize_t *shape, *strides, *suboffsets;
    void *internal;
};
void *PyList_GetItem(void *list, ssize_t index);
int PyObject_GetBuffer(void *object, Py_buffer *view, int flags);
void PyBuffer_Release(Py_buffer *view);
void *PyEval_SaveThread();
void PyEval_RestoreThread(void *state);
}

namespace {

constexpr size_t kPage = 4096;  // of a header, and what O_DIRECT wants everything to be a multiple of (record.py)
constexpr size_t kCrcAt = kPage - 4;
constexpr int kMostParts = 1024;  // Linux's IOV_MAX

// CRC-32 as zlib computes it, of `fields` bytes with zeros behind them up to kCrcAt. The zeros are not walked: what they
// do to the state is linear over GF(2), so four tables hold it by byte of the state.
class HeaderCrc {
   public:
    explicit HeaderCrc(size_t fields) : fields_(fields) {
        for (uint32_t value = 0; value < 256; ++value) {
            uint32_t state = value;
            for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (state & 1 ? 0xEDB88320u : 0u);
            bytes_[value] = state;
        }
        for (int place = 0; place < 4; ++place) {
            std::array<uint32_t, 8> bits;
            for (int bit = 0; bit < 8; ++bit) {
                uint32_t state = 1u << (8 * place + bit);
                for (size_t zero = fields; zero < kCrcAt; ++zero) state = bytes_[state & 255] ^ (state >> 8);
                bits[bit] = state;
            }
            for (uint32_t value = 0; value < 256; ++value) {
                uint32_t state = 0;
                for (int bit = 0; bit < 8; ++bit) state ^= value >> bit & 1 ? bits[bit] : 0u;
                behind_[place][value] = state;
            }
        }
    }

    void stamp(uint8_t *page) const {
        uint32_t state = ~0u;
        for (size_t at = 0; at < fields_; ++at) state = bytes_[(state ^ page[at]) & 255] ^ (state >> 8);
        state = behind_[0][state & 255] ^ behind_[1][state >> 8 & 255] ^ behind_[2][state >> 16 & 255] ^
                behind_[3][state >> 24];
        state = ~state;
        for (int byte = 0; byte < 4; ++byte) page[kCrcAt + byte] = static_cast<uint8_t>(state >> (8 * byte));
    }

   private:
    size_t fields_;
    std::array<uint32_t, 256> bytes_;
    std::array<std::array<uint32_t, 256>, 4> behind_;
};

// Past the caches: the disk reads these bytes next and no processor does. A block took 10 us so instead of 21 (measured),
// and the interpreter's own memory stays in the cache. `to` is a page's beginning.
void copy(uint8_t *to, const uint8_t *from, size_t size) {
#if defined(__SSE2__)
    for (; size >= 64; size -= 64, to += 64, from += 64) {
        __m128i line[4];
        for (int i = 0; i < 4; ++i) line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from) + i);
        for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i *>(to) + i, line[i]);
    }
    _mm_sfence();
#endif
    std::memcpy(to, from, size);
}

// 0 when all of it is there, else the errno: EIO for a write that stopped short at no page.
int write_all(int descriptor, std::vector<iovec> &parts, int64_t offset) {
    size_t first = 0, rest = 0;
    for (const iovec &part : parts) rest += part.iov_len;
    while (rest > 0) {
        const int count = static_cast<int>(std::min<size_t>(parts.size() - first, kMostParts));
        const ssize_t done = pwritev(descriptor, &parts[first], count, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        size_t left = static_cast<size_t>(done);
        if (left == 0 || (left % kPage != 0 && left != rest)) return EIO;
        offset += done;
        rest -= left;
        while (first < parts.size() && left >= parts[first].iov_len) left -= parts[first++].iov_len;
        if (left > 0) {
            parts[first].iov_base = static_cast<uint8_t *>(parts[first].iov_base) + left;
            parts[first].iov_len -= left;
        }
    }
    return 0;
}

struct Run {
    int64_t tag;
    int descriptor;
    int64_t offset;
    std::vector<iovec> records;
};

struct Outcome {
    int64_t tag;
    int32_t error;
};

// Threads that write runs as they come; whoever submitted collects the outcomes.
class Writers {
   public:
    Writers(int threads, size_t fields) : crc_(fields), working_(threads) {
        for (int number = 0; number < threads; ++number) threads_.emplace_back([this] { work(); });
    }

    ~Writers() {
        close();
        for (std::thread &thread : threads_) thread.join();
    }

    void submit(Run &&run) {
        {
            std::lock_guard<std::mutex> held(mutex_);
            runs_.push_back(std::move(run));
            ++under_way_;
        }
        coming_.notify_one();
    }

    void close() {
        {
            std::lock_guard<std::mutex> held(mutex_);
            closing_ = true;
        }
        coming_.notify_all();
    }

    // Waits for `least` outcomes, or all there will be for now; 0 after `close`, when every run had its outcome.
    int64_t collect(Outcome *out, int64_t least, int64_t most) {
        std::unique_lock<std::mutex> held(mutex_);
        written_.wait(held, [this, least] {
            const auto count = static_cast<int64_t>(outcomes_.size());
            return count >= least || (count > 0 && under_way_ == 0) || working_ == 0;
        });
        int64_t count = 0;
        for (; count < most && !outcomes_.empty(); outcomes_.pop_front()) out[count++] = outcomes_.front();
        return count;
    }

   private:
    void work() {
        std::unique_lock<std::mutex> held(mutex_);
        for (;;) {
            coming_.wait(held, [this] { return closing_ || !runs_.empty(); });
            if (runs_.empty()) break;
            Run run = std::move(runs_.front());
            runs_.pop_front();
            held.unlock();
            for (const iovec &record : run.records) crc_.stamp(static_cast<uint8_t *>(record.iov_base));
            const int error = write_all(run.descriptor, run.records, run.offset);
            held.lock();
            outcomes_.push_back({run.tag, error});
            --under_way_;
            written_.notify_one();
        }
        if (--working_ == 0) written_.notify_all();
    }

    const HeaderCrc crc_;
    std::mutex mutex_;
    std::condition_variable coming_, written_;
    std::deque<Run> runs_;
    std::deque<Outcome> outcomes_;
    bool closing_ = false;
    int working_;
    int64_t under_way_ = 0;  // submitted, without an outcome
    std::vector<std::thread> threads_;
};

}  // namespace

extern "C" {

// Each payload of a list into its record: a page of zeros for the header, the payload, zeros up to the record's end.
// Called with the interpreter lock, which others have while the bytes are copied; -1 with a Python error set.
int64_t headrace_records_fill(void *payloads, int64_t count, const uint64_t *records, const uint64_t *sizes) {
    std::vector<Py_buffer> views(static_cast<size_t>(count));
    int64_t taken = 0;
    for (; taken < count; ++taken) {
        void *payload = PyList_GetItem(payloads, taken);
        if (payload == nullptr || PyObject_GetBuffer(payload, &views[taken], 0) != 0) break;
    }
    if (taken == count) {
        void *state = PyEval_SaveThread();
        for (int64_t i = 0; i < count; ++i) {
            uint8_t *record = reinterpret_cast<uint8_t *>(records[i]);
            const size_t end = std::min<size_t>(kPage + views[i].len, sizes[i]);
            std::memset(record, 0, kPage);
            copy(record + kPage, static_cast<const uint8_t *>(views[i].buf), end - kPage);
            std::memset(record + end, 0, sizes[i] - end);
        }
        PyEval_RestoreThread(state);
    }
    for (int64_t i = 0; i < taken; ++i) PyBuffer_Release(&views[i]);
    return taken == count ? 0 : -1;
}

// The checksum of a header whose `fields` bytes are in `page` and zeros behind them.
void headrace_records_stamp(uint8_t *page, int64_t fields) { HeaderCrc(static_cast<size_t>(fields)).stamp(page); }

void *headrace_writers_new(int64_t threads, int64_t fields) {
    return new Writers(static_cast<int>(threads), static_cast<size_t>(fields));
}

// Records that lie one behind the other from `offset` on; their memory stays until the outcome is collected.
void headrace_writers_submit(void *writers, int64_t tag, int64_t descriptor, int64_t offset, int64_t count,
                             const uint64_t *records, const uint64_t *sizes) {
    Run run{tag, static_cast<int>(descriptor), offset, {}};
    run.records.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) run.records.push_back({reinterpret_cast<void *>(records[i]), sizes[i]});
    static_cast<Writers *>(writers)->submit(std::move(run));
}

int64_t headrace_writers_collect(void *writers, Outcome *out, int64_t least, int64_t most) {
    return static_cast<Writers *>(writers)->collect(out, least, most);
}

void headrace_writers_close(void *writers) { static_cast<Writers *>(writers)->close(); }

// After `close`, when `collect` has said 0.
void headrace_writers_free(void *writers) { delete static_cast<Writers *>(writers); }

}  // extern "C"
