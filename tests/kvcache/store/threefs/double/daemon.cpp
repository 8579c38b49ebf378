#include "daemon.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>

#include "abi.h"

namespace threefs_double {

namespace {
int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}
}  // namespace

Registered::Registered(int fd) : duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 0)), access(::fcntl(fd, F_GETFL) & O_ACCMODE) {
  if (duplicate < 0) throw std::runtime_error("dup");
}
Registered::~Registered() { ::close(duplicate); }

Shared::Shared(size_t bytes) : size(bytes) {
  int fd = ::memfd_create("hf3fs-double", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw std::runtime_error("memfd");
  auto map = [&] { return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); };
  void *first = map(), *second = map();
  ::close(fd);
  if (first == MAP_FAILED || second == MAP_FAILED) throw std::runtime_error("mmap");
  client = static_cast<uint8_t *>(first);
  daemon = static_cast<uint8_t *>(second);
}
void Shared::unmap_client() {
  if (client) ::munmap(client, size);
  client = nullptr;
}
Shared::~Shared() {
  unmap_client();
  ::munmap(daemon, size);
}

Daemon &Daemon::instance() {
  static Daemon *daemon = new Daemon;  // never destroyed: its thread may outlive static destructors
  return *daemon;
}

Daemon::Daemon() {
  counters_["generation"] = 1;
  if (const char *text = std::getenv("HF3FS_DOUBLE")) {  // "delay_us=2000,jitter_us=500"
    std::string all(text);
    for (size_t begin = 0; begin < all.size();) {
      size_t end = std::min(all.find(',', begin), all.size());
      size_t equals = all.find('=', begin);
      if (equals < end) settings_[all.substr(begin, equals - begin)] = std::atoll(all.c_str() + equals + 1);
      begin = end + 1;
    }
    random_.seed(static_cast<uint64_t>(settings_["seed"]));
  }
  std::thread([this] { run(); }).detach();
}

int Daemon::set(const std::string &key, int64_t value) {
  std::lock_guard lock(mutex_);
  if (!settings_.count(key)) return -EINVAL;
  if (key == "release") {
    for (; value > 0 && !held_.empty(); --value) {
      due_.emplace(0, held_.back());
      held_.pop_back();
    }
  } else {
    if (key == "mounted" && settings_[key] != value) {
      if (!value) {  // a dead FUSE process takes what it was doing with it
        counters_["inflight"] -= static_cast<int64_t>(held_.size() + due_.size());
        held_.clear();
        due_.clear();
      } else {
        ++counters_["generation"];
      }
    }
    if (key == "seed") random_.seed(static_cast<uint64_t>(value));
    settings_[key] = value;
  }
  changed_.notify_all();
  return 0;
}

int64_t Daemon::get(const std::string &key) {
  std::lock_guard lock(mutex_);
  if (key == "held") return static_cast<int64_t>(held_.size());
  auto setting = settings_.find(key);
  return setting != settings_.end() ? setting->second : counters_[key];
}

bool Daemon::mounted() { return get("mounted") != 0; }
uint64_t Daemon::generation() { return static_cast<uint64_t>(get("generation")); }

void Daemon::violation() {
  std::lock_guard lock(mutex_);
  ++counters_["violations"];
}

void Daemon::submit(std::vector<std::shared_ptr<Io>> ios) {
  std::lock_guard lock(mutex_);
  if (!settings_["mounted"]) return;  // nobody reads this ring any more
  for (auto &io : ios) {
    if (io->ring->generation != static_cast<uint64_t>(counters_["generation"])) continue;
    ++counters_["submitted"];
    ++counters_["inflight"];
    if (settings_["hold"]) {
      held_.push_back(io);
      continue;
    }
    int64_t jitter = settings_["jitter_us"];
    int64_t delay = settings_["delay_us"] + (jitter > 0 ? static_cast<int64_t>(random_() % jitter) : 0);
    due_.emplace(now_us() + delay, io);
  }
  changed_.notify_all();
}

void Daemon::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    if (due_.empty()) {
      changed_.wait(lock);
      continue;
    }
    int64_t wait = due_.begin()->first - now_us();
    if (wait > 0) {
      changed_.wait_for(lock, std::chrono::microseconds(wait));
      continue;
    }
    auto io = due_.begin()->second;
    due_.erase(due_.begin());
    ++executed_;
    bool fail = settings_["fail_every"] > 0 && executed_ % settings_["fail_every"] == 0;
    bool cut = settings_["short_every"] > 0 && executed_ % settings_["short_every"] == 0;
    int64_t error = settings_["fail_errno"];
    bool stray = settings_["stray"] != 0;
    lock.unlock();
    int64_t result = fail ? -error : execute(*io, fail, cut);
    lock.lock();
    --counters_["inflight"];
    ++counters_["completed"];
    lock.unlock();
    if (stray) {
      std::lock_guard ring(io->ring->mutex);
      io->ring->completions.push_back({-1, static_cast<int64_t>(io->length), reinterpret_cast<void *>(~uintptr_t{0})});
    }
    finish(*io, result);
    io.reset();
    lock.lock();
  }
}

void Daemon::finish(const Io &io, int64_t result) {
  std::lock_guard lock(io.ring->mutex);
  io.ring->completions.push_back({io.index, result, io.userdata});
  io.ring->ready.notify_all();
}

int64_t Daemon::execute(const Io &io, bool fail, bool cut) {
  (void)fail;
  Io part = io;
  if (cut) part.length = std::max<uint64_t>(1, part.length / 2);
  if (part.read) return read(part);
  size_t done = 0;
  while (done < part.length) {
    ssize_t moved = ::pwrite(part.file->duplicate, part.memory->daemon + part.memory_offset + done, part.length - done,
                             part.file_offset + static_cast<off_t>(done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -errno;
    done += static_cast<size_t>(moved);
  }
  return static_cast<int64_t>(done);
}

// 3FS keeps a file as chunks, each as long as the last byte written to it; a chunk never written does not exist. The
// plain file's extents say what was written. A read gets from each chunk what it has; where a later chunk has bytes
// again, the gap is a hole: zeros, or ENODATA for the whole read when the ring forbids holes. A gap up to the end of
// what was asked cannot be told from the end of the file: the result is short.
int64_t Daemon::read(const Io &io) {
  int fd = io.file->duplicate;
  uint8_t *target = io.memory->daemon + io.memory_offset;
  int64_t chunk_bytes = get("chunk_bytes");
  int64_t end = io.file_offset + static_cast<int64_t>(io.length);
  int64_t result = 0;
  bool gap = false;
  for (int64_t at = io.file_offset; at < end;) {
    int64_t chunk = at - at % chunk_bytes;
    int64_t stop = std::min(end, chunk + chunk_bytes);
    int64_t last = chunk;  // end of the last written extent of this chunk
    for (int64_t probe = chunk; probe < chunk + chunk_bytes;) {
      off_t data = ::lseek(fd, probe, SEEK_DATA);
      if (data < 0 || data >= chunk + chunk_bytes) break;
      off_t hole = ::lseek(fd, data, SEEK_HOLE);
      last = std::min<int64_t>(hole < 0 ? chunk + chunk_bytes : hole, chunk + chunk_bytes);
      probe = last;
    }
    int64_t have = std::max<int64_t>(0, std::min(stop, last) - at);
    if (have > 0) {
      if (gap) {
        if (io.ring->flags & kForbidReadHoles) return -ENODATA;
        std::memset(target + result, 0, static_cast<size_t>(at - io.file_offset - result));
        result = at - io.file_offset;
        gap = false;
      }
      for (int64_t done = 0; done < have;) {
        ssize_t moved = ::pread(fd, target + (at - io.file_offset) + done, static_cast<size_t>(have - done), at + done);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return -errno;
        if (moved == 0) break;
        done += moved;
      }
      result += have;
    }
    if (at + have < stop) gap = true;
    at = stop;
  }
  return result;
}

}  // namespace threefs_double
