// The published calls. Contract breaches that the real library leaves undefined (two threads preparing on one ring, two
// waiting on one) are counted as "violations", so that tests can assert that there are none.
#include "abi.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon.h"

using namespace threefs_double;

namespace {

std::mutex registry_mutex;
std::map<int, std::shared_ptr<Registered>> registered;
std::map<std::string, std::shared_ptr<Shared>> memories;  // by id, as the FUSE process finds them
std::mt19937_64 id_source{std::random_device{}()};

// The nearest ancestor that has the virtual directory of a mounted 3FS, or "".
std::string mount_of(std::string path) {
  while (path.size() > 1) {
    struct stat info;
    if (::stat((path + "/3fs-virt/iovs").c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return path;
    path.resize(path.rfind('/'));
  }
  return "";
}

std::string hex(const char *id) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits[static_cast<uint8_t>(id[i]) >> 4];
    text += digits[id[i] & 15];
  }
  return text;
}

std::string ring_suffix(bool for_read, int io_depth, int timeout) {
  return std::string(".") + (for_read ? "r" : "w") + std::to_string(io_depth) + ".t" + std::to_string(timeout);
}

std::string binary(uint64_t value) {
  std::string text;
  for (; value; value >>= 1) text.insert(text.begin(), static_cast<char>('0' + (value & 1)));
  return text;
}

int create_memory(hf3fs_iov *iov, const char *mount_point, size_t size, size_t block_size, int numa,
                  const std::string &suffix) {
  if (!iov || !mount_point || !*mount_point || std::strlen(mount_point) >= sizeof iov->mount_point || size == 0)
    return -EINVAL;
  if (!Daemon::instance().mounted()) return -ENOTCONN;
  std::string folder = std::string(mount_point) + "/3fs-virt/iovs";
  int directory = ::open(folder.c_str(), O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return -errno;
  ::close(directory);
  std::shared_ptr<Shared> memory;
  try {
    memory = std::make_shared<Shared>(size);
  } catch (const std::runtime_error &) {
    return -EIO;
  }
  std::lock_guard lock(registry_mutex);
  uint64_t words[2] = {id_source(), id_source()};
  std::memset(iov, 0, sizeof *iov);
  std::memcpy(iov->id, words, sizeof iov->id);
  // Registration is a symbolic link whose name carries the parameters.
  if (::symlink("/dev/shm/hf3fs-iov-double", (folder + "/" + hex(iov->id) + suffix).c_str()) != 0) return -errno;
  std::strcpy(iov->mount_point, mount_point);
  iov->base = memory->client;
  iov->size = size;
  iov->block_size = block_size;
  iov->numa = numa;
  iov->iovh = new std::shared_ptr<Shared>(memory);
  memories[std::string(iov->id, 16)] = memory;
  return 0;
}

void destroy_memory(hf3fs_iov *iov, const std::string &suffix) {
  if (!iov || !iov->iovh) return;
  ::unlink((std::string(iov->mount_point) + "/3fs-virt/iovs/" + hex(iov->id) + suffix).c_str());
  auto *memory = static_cast<std::shared_ptr<Shared> *>(iov->iovh);
  (*memory)->unmap_client();
  std::lock_guard lock(registry_mutex);
  memories.erase(std::string(iov->id, 16));
  delete memory;
  iov->iovh = nullptr;
  iov->base = nullptr;
}

std::shared_ptr<Ring> &ring_of(const hf3fs_ior *ior) { return *static_cast<std::shared_ptr<Ring> *>(ior->iorh); }

// Counts a second thread inside a section that the published contract gives to one.
struct Alone {
  std::atomic<int> &inside;
  explicit Alone(std::atomic<int> &count) : inside(count) {
    if (inside.fetch_add(1) != 0) Daemon::instance().violation();
  }
  ~Alone() { inside.fetch_sub(1); }
};

}  // namespace

bool hf3fs_is_hf3fs(int fd) {
  char link[PATH_MAX];
  ssize_t length = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), link, sizeof link);
  return length > 0 && Daemon::instance().mounted() && !mount_of(std::string(link, static_cast<size_t>(length))).empty();
}

int hf3fs_extract_mount_point(char *mount_point, int size, const char *path) {
  char real[PATH_MAX];
  if (!::realpath(path, real)) return -1;
  std::string mount = mount_of(real);
  if (mount.empty()) return -1;
  if (static_cast<int>(mount.size()) < size) std::strcpy(mount_point, mount.c_str());
  return static_cast<int>(mount.size()) + 1;
}

int hf3fs_iovcreate(hf3fs_iov *iov, const char *mount_point, size_t size, size_t block_size, int numa) {
  return create_memory(iov, mount_point, size, block_size, numa, "");
}

void hf3fs_iovdestroy(hf3fs_iov *iov) { destroy_memory(iov, ""); }

size_t hf3fs_ior_size(int entries) { return 4096 + static_cast<size_t>(entries) * 128; }

int hf3fs_iorcreate4(hf3fs_ior *ior, const char *mount_point, int entries, bool for_read, int io_depth, int timeout,
                     int numa, uint64_t flags) {
  if (!ior || entries < 1 || timeout < 0) return -EINVAL;
  std::memset(ior, 0, sizeof *ior);
  std::string suffix = ring_suffix(for_read, io_depth, timeout) + (flags ? ".f" + binary(flags) : "");
  int result = create_memory(&ior->iov, mount_point, hf3fs_ior_size(entries), 0, numa, suffix);
  if (result != 0) return result;
  auto ring = std::make_shared<Ring>();
  ring->entries = entries;
  ring->for_read = for_read;
  ring->io_depth = io_depth;
  ring->flags = flags;
  ring->generation = Daemon::instance().generation();
  for (int32_t i = entries - 1; i >= 0; --i) ring->free_slots.push_back(i);
  ior->iorh = new std::shared_ptr<Ring>(ring);
  std::strcpy(ior->mount_point, mount_point);
  ior->for_read = for_read;
  ior->io_depth = io_depth;
  ior->timeout = timeout;
  ior->flags = flags;
  return 0;
}

void hf3fs_iordestroy(hf3fs_ior *ior) {
  if (!ior || !ior->iorh) return;
  if (ring_of(ior)->waiting.load() != 0 || ring_of(ior)->preparing.load() != 0) Daemon::instance().violation();
  delete static_cast<std::shared_ptr<Ring> *>(ior->iorh);
  ior->iorh = nullptr;
  // As published: the name is built with the flags in decimal where creation wrote them in binary, so the link of a
  // ring with flags stays behind.
  destroy_memory(&ior->iov, ring_suffix(ior->for_read, ior->io_depth, ior->timeout) +
                                (ior->flags ? ".f" + std::to_string(ior->flags) : ""));
}

int hf3fs_reg_fd(int fd, uint64_t) {
  if (!hf3fs_is_hf3fs(fd)) return EBADF;
  std::lock_guard lock(registry_mutex);
  if (registered.count(fd)) return EINVAL;
  std::shared_ptr<Registered> entry;
  try {
    entry = std::make_shared<Registered>(fd);
  } catch (const std::runtime_error &) {
    return EMFILE;
  }
  registered[fd] = entry;
  registered[entry->duplicate] = entry;
  return -entry->duplicate;
}

void hf3fs_dereg_fd(int fd) {
  if (!hf3fs_is_hf3fs(fd)) return;  // so a registration outlives a vanished mount, as published
  std::shared_ptr<Registered> last;
  std::lock_guard lock(registry_mutex);
  auto found = registered.find(fd);
  if (found == registered.end()) return;
  last = found->second;
  registered.erase(found);
  for (auto it = registered.begin(); it != registered.end();) it = it->second == last ? registered.erase(it) : ++it;
}

int hf3fs_io_entries(const hf3fs_ior *ior) { return ring_of(ior)->entries; }

int hf3fs_prep_io(const hf3fs_ior *ior, const hf3fs_iov *iov, bool read, void *ptr, int fd, size_t off, uint64_t len,
                  const void *userdata) {
  if (!ior || !ior->iorh || !iov || !iov->base || !ptr || len == 0 || read != ior->for_read) return -EINVAL;
  auto &ring = ring_of(ior);
  Alone alone(ring->preparing);
  auto *begin = static_cast<uint8_t *>(ptr);
  if (begin < iov->base || begin + len > iov->base + iov->size) return -EINVAL;
  auto io = std::make_shared<Io>();
  {
    std::lock_guard lock(registry_mutex);
    auto file = registered.find(fd < 0 ? -fd : fd);
    if (file == registered.end()) return -EBADF;
    auto memory = memories.find(std::string(iov->id, 16));
    if (memory == memories.end()) return -EINVAL;
    io->file = file->second;
    io->memory = memory->second;
  }
  if (io->file->access == (read ? O_WRONLY : O_RDONLY)) return -EACCES;
  std::lock_guard lock(ring->mutex);
  if (ring->free_slots.empty()) return -EAGAIN;
  io->index = ring->free_slots.back();
  ring->free_slots.pop_back();
  io->ring = ring;
  io->read = read;
  io->memory_offset = static_cast<size_t>(begin - iov->base);
  io->file_offset = static_cast<int64_t>(off);
  io->length = len;
  io->userdata = userdata;
  ring->prepared.push_back(io);
  return io->index;
}

int hf3fs_submit_ios(const hf3fs_ior *ior) {
  if (!ior || !ior->iorh) return -EINVAL;
  auto &ring = ring_of(ior);
  Alone alone(ring->preparing);
  std::vector<std::shared_ptr<Io>> batch;
  {
    std::lock_guard lock(ring->mutex);
    size_t ready = ring->prepared.size();
    if (ring->io_depth > 0) ready -= ready % static_cast<size_t>(ring->io_depth);
    auto end = ring->prepared.begin() + static_cast<std::ptrdiff_t>(ready);
    batch.assign(ring->prepared.begin(), end);
    ring->prepared.erase(ring->prepared.begin(), end);
  }
  Daemon::instance().submit(std::move(batch));
  return 0;
}

int hf3fs_wait_for_ios(const hf3fs_ior *ior, hf3fs_cqe *cqes, int cqec, int min_results, const timespec *abs_timeout) {
  if (cqec <= 0 || !ior || !ior->iorh) return -EINVAL;
  min_results = std::min(min_results, cqec);
  auto ring = ring_of(ior);
  Alone alone(ring->waiting);
  std::unique_lock lock(ring->mutex);
  int filled = 0;
  while (true) {
    for (; filled < cqec && !ring->completions.empty(); ring->completions.pop_front()) {
      const Completion &done = ring->completions.front();
      cqes[filled].index = done.index;
      cqes[filled].result = done.result;
      cqes[filled].userdata = done.userdata;
      ++filled;
      if (done.index >= 0) ring->free_slots.push_back(done.index);
    }
    if (filled >= min_results || filled == cqec) return filled;
    if (!abs_timeout) {
      ring->ready.wait(lock);
      continue;
    }
    auto until = std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(
        std::chrono::seconds(abs_timeout->tv_sec) + std::chrono::nanoseconds(abs_timeout->tv_nsec)));
    if (ring->ready.wait_until(lock, until) == std::cv_status::timeout && ring->completions.empty()) return filled;
  }
}

int headrace_double_set(const char *key, int64_t value) { return Daemon::instance().set(key, value); }
int64_t headrace_double_get(const char *key) {
  if (std::string(key) == "registered") {
    std::lock_guard lock(registry_mutex);
    return static_cast<int64_t>(registered.size() / 2);
  }
  return Daemon::instance().get(key);
}
