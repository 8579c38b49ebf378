// The FUSE process of the double: it executes what rings hand it, late, out of order, failing or not at all, on the
// plain files behind the "mount". One per process; a remount ends every ring made before, as a new FUSE process does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace threefs_double {

// A descriptor that was registered. As in 3FS, the duplicate lives on when the original is closed.
struct Registered {
  int duplicate;
  int access;  // O_RDONLY, O_WRONLY or O_RDWR
  explicit Registered(int fd);
  ~Registered();
  Registered(const Registered &) = delete;
};

// Shared memory: the client's mapping ends with iovdestroy, the daemon's with the last I/O that uses it.
struct Shared {
  uint8_t *client = nullptr;
  uint8_t *daemon = nullptr;
  size_t size = 0;
  explicit Shared(size_t bytes);
  ~Shared();
  void unmap_client();
  Shared(const Shared &) = delete;
};

struct Completion {
  int32_t index;
  int64_t result;
  const void *userdata;
};

struct Ring {
  int entries;
  bool for_read;
  int io_depth;
  uint64_t flags;
  uint64_t generation;  // of the mount it was made on
  std::mutex mutex;
  std::condition_variable ready;
  std::deque<Completion> completions;
  std::vector<int32_t> free_slots;
  std::vector<std::shared_ptr<struct Io>> prepared;
  std::atomic<int> preparing{0}, waiting{0};  // who is inside; more than one breaks the published contract
};

struct Io {
  std::shared_ptr<Ring> ring;
  std::shared_ptr<Shared> memory;
  std::shared_ptr<Registered> file;
  int32_t index;
  bool read;
  size_t memory_offset;
  int64_t file_offset;
  uint64_t length;
  const void *userdata;
};

class Daemon {
 public:
  static Daemon &instance();

  int set(const std::string &key, int64_t value);
  int64_t get(const std::string &key);
  bool mounted();
  uint64_t generation();
  void submit(std::vector<std::shared_ptr<Io>> ios);
  void violation();

 private:
  Daemon();
  void run();
  void finish(const Io &io, int64_t result);
  int64_t execute(const Io &io, bool fail, bool cut);
  int64_t read(const Io &io);

  std::mutex mutex_;
  std::condition_variable changed_;
  // What a test can set, by name:
  std::map<std::string, int64_t> settings_{
      {"mounted", 1},          // 0: the FUSE process is gone; 1 after 0: a new one
      {"hold", 0},             // 1: I/O waits for "release"
      {"release", 0},          // let so many held I/Os go now, last submitted first
      {"delay_us", 0},         // least time that an I/O takes
      {"jitter_us", 0},        // and what is added at random: completions come out of order
      {"seed", 1},             // of that randomness
      {"fail_every", 0},       // every n-th I/O fails …
      {"fail_errno", 5},       // … with this errno
      {"short_every", 0},      // every n-th I/O moves half of its bytes
      {"chunk_bytes", 4 << 20},
      {"stray", 0},            // 1: every completion comes with one that nobody asked for
  };
  // And what it can only ask for: "submitted", "completed", "inflight", "violations", "generation".
  std::map<std::string, int64_t> counters_;
  std::multimap<int64_t, std::shared_ptr<Io>> due_;  // by monotonic microseconds
  std::deque<std::shared_ptr<Io>> held_;
  std::mt19937_64 random_{1};
  int64_t executed_ = 0;
};

}  // namespace threefs_double
