// The ABI of libhf3fs_api_shared.so as the double offers it: our own declarations of what deepseek-ai/3FS publishes in
// src/lib/api/hf3fs_usrbio.h. Sizes and offsets are those of x86-64 and aarch64 and are asserted here, so that a test
// can compare Python's ctypes declarations with a compiler's view of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>

extern "C" {

struct hf3fs_iov {
  uint8_t *base;
  void *iovh;
  char id[16];
  char mount_point[256];
  size_t size;
  size_t block_size;
  int numa;
};

struct hf3fs_ior {
  hf3fs_iov iov;
  void *iorh;
  char mount_point[256];
  bool for_read;
  int io_depth;
  int priority;
  int timeout;
  uint64_t flags;
};

struct hf3fs_cqe {
  int32_t index;
  int32_t reserved;
  int64_t result;
  const void *userdata;
};

static_assert(sizeof(hf3fs_iov) == 312 && offsetof(hf3fs_iov, size) == 288 && offsetof(hf3fs_iov, numa) == 304);
static_assert(sizeof(hf3fs_ior) == 600 && offsetof(hf3fs_ior, for_read) == 576 && offsetof(hf3fs_ior, flags) == 592);
static_assert(sizeof(hf3fs_cqe) == 24 && offsetof(hf3fs_cqe, userdata) == 16);

constexpr uint64_t kForbidReadHoles = 2;

bool hf3fs_is_hf3fs(int fd);
int hf3fs_extract_mount_point(char *mount_point, int size, const char *path);
int hf3fs_iovcreate(hf3fs_iov *iov, const char *mount_point, size_t size, size_t block_size, int numa);
void hf3fs_iovdestroy(hf3fs_iov *iov);
size_t hf3fs_ior_size(int entries);
int hf3fs_iorcreate4(hf3fs_ior *ior, const char *mount_point, int entries, bool for_read, int io_depth, int timeout,
                     int numa, uint64_t flags);
void hf3fs_iordestroy(hf3fs_ior *ior);
int hf3fs_reg_fd(int fd, uint64_t flags);
void hf3fs_dereg_fd(int fd);
int hf3fs_io_entries(const hf3fs_ior *ior);
int hf3fs_prep_io(const hf3fs_ior *ior, const hf3fs_iov *iov, bool read, void *ptr, int fd, size_t off, uint64_t len,
                  const void *userdata);
int hf3fs_submit_ios(const hf3fs_ior *ior);
int hf3fs_wait_for_ios(const hf3fs_ior *ior, hf3fs_cqe *cqes, int cqec, int min_results,
                       const timespec *abs_timeout);

// Not of the ABI: how a test plays the file system's moods. Keys and defaults are in daemon.h.
int headrace_double_set(const char *key, int64_t value);
int64_t headrace_double_get(const char *key);
}
