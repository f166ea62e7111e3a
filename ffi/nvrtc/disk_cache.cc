#include "nvrtc/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

namespace jaxsparse {
namespace {

constexpr char kMagic[] = "jaxsparse kernel 1\n";
constexpr char kSuffix[] = ".kernel";
constexpr int64_t kDefaultLimit = int64_t{1} << 30;  // bytes: about 20,000 kernels
// Seconds after which a file that is half written is taken to be that of a process that was killed.
constexpr int64_t kAbandoned = 3600;

// FNV-1a. It only names files and detects torn ones: the key itself is compared.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return hash;
}

std::filesystem::path PathOf(const std::string& folder, const std::string& key) {
  char name[32];
  std::snprintf(name, sizeof(name), "%016llx%s", static_cast<unsigned long long>(Hash(key)),
                kSuffix);
  return std::filesystem::path(folder) / name;
}

void Append(std::string* to, const std::string& part) {
  *to += std::to_string(part.size()) + "\n" + part;
}

bool Take(const std::string& from, size_t* at, std::string* part) {
  const size_t end = from.find('\n', *at);
  if (end == std::string::npos || end - *at > 12) return false;
  const size_t size = std::strtoull(from.c_str() + *at, nullptr, 10);
  if (size > from.size() - end - 1) return false;
  *part = from.substr(end + 1, size);
  *at = end + 1 + size;
  return true;
}

std::optional<CompiledKernel> ReadCache(const std::string& key) {
  const std::string folder = CacheFolder();
  if (folder.empty()) return std::nullopt;
  std::ifstream file(PathOf(folder, key), std::ios::binary);
  if (!file) return std::nullopt;
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  size_t at = sizeof(kMagic) - 1;
  std::string stored_key, checksum;
  CompiledKernel kernel;
  if (text.compare(0, at, kMagic) != 0 || !Take(text, &at, &stored_key) || stored_key != key ||
      !Take(text, &at, &kernel.lowered_name) || !Take(text, &at, &kernel.code) ||
      !Take(text, &at, &checksum) || checksum != std::to_string(Hash(kernel.code))) {
    return std::nullopt;
  }
  // Used last now; when it was written stays as it is.
  const timespec times[] = {{0, UTIME_NOW}, {0, UTIME_OMIT}};
  utimensat(AT_FDCWD, PathOf(folder, key).c_str(), times, 0);
  return kernel;
}

// A file of the cache: a kernel, or one that has been written aside.
struct CacheFile {
  std::filesystem::path path;
  int64_t bytes, used;  // seconds since 1970
};

// Others that lie in the folder are nobody's here.
std::vector<CacheFile> FilesOf(const std::string& folder, bool written_aside) {
  constexpr size_t kHash = 16, kName = kHash + sizeof(kSuffix) - 1;
  std::vector<CacheFile> files;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    struct stat status;
    const bool is_ours = name.size() >= kName &&
                         name.find_first_not_of("0123456789abcdef") == kHash &&
                         name.compare(kHash, kName - kHash, kSuffix) == 0 &&
                         name.find_first_not_of(".0123456789", kName) == name.npos;
    if (!is_ours || (name.size() > kName) != written_aside ||
        lstat(entry->path().c_str(), &status) != 0 || !S_ISREG(status.st_mode)) {
      continue;
    }
    files.push_back({entry->path(), static_cast<int64_t>(status.st_size),
                     static_cast<int64_t>(written_aside ? status.st_mtime : status.st_atime)});
  }
  return files;
}

// Removes what killed processes have left, and of kernels those that were used longest ago, until
// the others keep the limit. The one at `newest` stays.
void CleanCache(const std::string& folder, const std::filesystem::path& newest) {
  std::error_code ignored;
  const auto now = static_cast<int64_t>(std::time(nullptr));
  for (const CacheFile& file : FilesOf(folder, true)) {
    if (file.used < now - kAbandoned) std::filesystem::remove(file.path, ignored);
  }
  std::vector<CacheFile> kernels = FilesOf(folder, false);
  int64_t bytes = 0;
  for (const CacheFile& kernel : kernels) bytes += kernel.bytes;
  if (bytes <= CacheLimit()) return;
  std::sort(kernels.begin(), kernels.end(),
            [](const CacheFile& a, const CacheFile& b) { return a.used < b.used; });
  for (const CacheFile& kernel : kernels) {
    if (bytes <= CacheLimit()) return;
    if (kernel.path == newest) continue;
    if (std::filesystem::remove(kernel.path, ignored)) bytes -= kernel.bytes;
  }
}

void WriteCache(const std::string& key, const CompiledKernel& kernel) {
  const std::string folder = CacheFolder();
  if (folder.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  std::string text = kMagic;
  Append(&text, key);
  Append(&text, kernel.lowered_name);
  Append(&text, kernel.code);
  Append(&text, std::to_string(Hash(kernel.code)));
  const std::filesystem::path path = PathOf(folder, key);
  static std::atomic<int> serial{0};
  const std::filesystem::path aside =
      path.string() + "." + std::to_string(getpid()) + "." + std::to_string(serial++);
  {
    std::ofstream file(aside, std::ios::binary);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    if (!file.flush()) {
      file.close();
      std::filesystem::remove(aside, ignored);
      return;
    }
  }
  std::filesystem::rename(aside, path, ignored);
  if (ignored) std::filesystem::remove(aside, ignored);
  CleanCache(folder, path);
}

}  // namespace

std::string CacheFolder() {
  if (const char* folder = std::getenv("JAXSPARSE_CACHE_DIR")) return folder;
  if (const char* base = std::getenv("XDG_CACHE_HOME"); base != nullptr && *base != '\0') {
    return std::string(base) + "/jaxsparse";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return std::string(home) + "/.cache/jaxsparse";
  }
  return "";
}

int64_t CacheLimit() {
  const char* variable = std::getenv("JAXSPARSE_CACHE_BYTES");
  const std::string_view text = variable == nullptr ? "" : variable;
  int64_t limit = kDefaultLimit;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), limit);
  const bool is_number = error == std::errc() && end == text.data() + text.size() && limit >= 0;
  return is_number ? limit : kDefaultLimit;
}

std::optional<CompiledKernel> CompileCached(const KernelSource& source,
                                            const std::string& architecture, std::string* error) {
  const std::string version = NvrtcVersion(error);
  if (version.empty()) return std::nullopt;
  std::optional<std::string> key = SourceKey(source, architecture, error);
  if (!key) return std::nullopt;
  *key = "NVRTC " + version + "\n" + *key;
  std::optional<CompiledKernel> kernel = ReadCache(*key);
  if (kernel) return kernel;
  kernel = Compile(source, architecture, error);
  if (kernel) WriteCache(*key, *kernel);
  return kernel;
}

}  // namespace jaxsparse
