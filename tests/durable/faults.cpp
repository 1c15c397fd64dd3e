// A disk that fails: preloaded into a process, it counts the writes, syncs, renames and truncations
// below one folder, and lets one of them fail or the whole machine lose power there.
//
// After a loss of power, what was not synced is undone, all of it or a random part, as if it had
// never reached the disk. SQLite's shared memory file is left out: it is made anew after a crash.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <vector>

namespace {

struct Undo {  // of one operation that may still be lost
  dev_t device;
  ino_t inode;
  int file;  // to write to; -1 for a rename
  off_t offset, old_size;
  std::string old_data;
  std::string from, to, backup;  // of a rename
};

std::mutex lock;
std::string folder;
std::vector<Undo> pending;
long count, fail_at;
int fail_errno;  // 0: lose power
unsigned seed;

template <class F>
F real(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

std::string path_of(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t size = readlink(link, path, sizeof path);
  return size < 0 ? "" : std::string(path, size);
}

bool is_below(const std::string& path) {
  return !folder.empty() && path.rfind(folder + "/", 0) == 0 &&
         path.find("-shm") == std::string::npos && path.find("/lock") == std::string::npos;
}

[[noreturn]] void lose_power() {
  for (auto one = pending.rbegin(); one != pending.rend(); ++one) {
    if (seed && rand_r(&seed) % 2) continue;  // this one had reached the disk
    if (one->file < 0) {
      real<int (*)(const char*, const char*)>("rename")(one->to.c_str(), one->from.c_str());
      if (!one->backup.empty()) {
        real<int (*)(const char*, const char*)>("rename")(one->backup.c_str(), one->to.c_str());
      }
      continue;
    }
    real<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite")(
        one->file, one->old_data.data(), one->old_data.size(), one->offset);
    struct stat now;
    fstat(one->file, &now);
    if (now.st_size > one->old_size || !seed) {
      real<int (*)(int, off_t)>("ftruncate")(one->file, one->old_size);
    }
  }
  _exit(99);
}

// Returns whether the operation fails, with errno set; does not return when power is lost.
bool fails() {
  if (++count != fail_at) return false;
  if (!fail_errno) lose_power();
  errno = fail_errno;
  return true;
}

void remember(int file, off_t offset, size_t size) {
  struct stat now;
  if (fstat(file, &now)) return;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  Undo undo{now.st_dev, now.st_ino, open(link, O_RDWR | O_CLOEXEC), offset, now.st_size, "", "",
            "", ""};
  if (undo.file < 0) return;
  undo.old_data.resize(size);
  const ssize_t got = pread(undo.file, undo.old_data.data(), size, offset);
  undo.old_data.resize(got > 0 ? got : 0);
  pending.push_back(undo);
}

void synced(int file) {
  struct stat now;
  if (fstat(file, &now)) return;
  const std::string path = path_of(file);
  std::vector<Undo> rest;
  for (Undo& one : pending) {
    const bool is_rename = one.file < 0;
    const bool is_done =
        is_rename ? one.to.substr(0, one.to.rfind('/')) == path
                  : one.device == now.st_dev && one.inode == now.st_ino;
    if (!is_done) {
      rest.push_back(one);
    } else if (!is_rename) {
      close(one.file);
    } else if (!one.backup.empty()) {
      unlink(one.backup.c_str());
    }
  }
  pending.swap(rest);
}

int sync_file(int file, const char* name) {
  const std::lock_guard guard(lock);
  const std::string path = path_of(file);
  const bool counts = is_below(path) || is_below(path + "/x");
  if (counts && fails()) return -1;
  if (!counts) return real<int (*)(int)>(name)(file);
  synced(file);  // the machine does not lose its power: a real sync would only wait for other work
  return 0;
}

ssize_t write_file(int file, const void* data, size_t size, off_t offset) {
  const std::lock_guard guard(lock);
  if (is_below(path_of(file))) {
    if (fails()) return -1;
    remember(file, offset, size);
  }
  return real<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite")(file, data, size, offset);
}

int truncate_file(int file, off_t size) {
  const std::lock_guard guard(lock);
  if (is_below(path_of(file))) {
    if (fails()) return -1;
    struct stat now;
    fstat(file, &now);
    remember(file, size, now.st_size > size ? now.st_size - size : 0);
  }
  return real<int (*)(int, off_t)>("ftruncate")(file, size);
}

}  // namespace

extern "C" {

// Begins to count below `path`; operation `at` fails with `error`, or loses power if that is 0.
void plan_fault(const char* path, long at, int error, unsigned with_seed) {
  folder = path, count = 0, fail_at = at, fail_errno = error, seed = with_seed;
  pending.clear();
}

long num_operations() { return count; }

ssize_t write(int file, const void* data, size_t size) {
  {
    const std::lock_guard guard(lock);
    if (is_below(path_of(file))) {
      if (fails()) return -1;
      remember(file, lseek(file, 0, SEEK_CUR), size);
    }
  }
  return real<ssize_t (*)(int, const void*, size_t)>("write")(file, data, size);
}
ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  return write_file(file, data, size, offset);
}
ssize_t pwrite64(int file, const void* data, size_t size, off_t offset) {
  return write_file(file, data, size, offset);
}
int ftruncate(int file, off_t size) noexcept { return truncate_file(file, size); }
int ftruncate64(int file, off_t size) noexcept { return truncate_file(file, size); }
int fsync(int file) { return sync_file(file, "fsync"); }
int fdatasync(int file) { return sync_file(file, "fdatasync"); }

int rename(const char* from, const char* to) noexcept {
  const std::lock_guard guard(lock);
  if (is_below(to)) {
    if (fails()) return -1;
    Undo undo{0, 0, -1, 0, 0, "", from, to, ""};
    static int number;
    const std::string backup = folder + ".backup" + std::to_string(++number);
    if (!link(to, backup.c_str())) undo.backup = backup;
    pending.push_back(undo);
  }
  return real<int (*)(const char*, const char*)>("rename")(from, to);
}
}
