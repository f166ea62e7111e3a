#include "nvrtc/disk_cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace jaxsparse {
namespace {

constexpr char kMagic[] = "jaxsparse kernel 1\n";

// FNV-1a. It only names files and detects torn ones: the key itself is compared.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return hash;
}

std::filesystem::path PathOf(const std::string& folder, const std::string& key) {
  char name[32];
  std::snprintf(name, sizeof(name), "%016llx.kernel", static_cast<unsigned long long>(Hash(key)));
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
  return kernel;
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
