#include "nvrtc/compiler.h"

#include <dlfcn.h>

#include <fstream>
#include <iterator>
#include <map>
#include <mutex>

namespace jaxsparse {
namespace {

// The part of nvrtc.h that is used; the library keeps this interface within a major version.
using Program = struct _nvrtcProgram*;
struct Nvrtc {
  int (*version)(int* major, int* minor);
  int (*create)(Program*, const char* source, const char* name, int headers,
                const char* const* texts, const char* const* names);
  int (*destroy)(Program*);
  int (*add_name)(Program, const char* expression);
  int (*compile)(Program, int options, const char* const* values);
  int (*lowered_name)(Program, const char* expression, const char** name);
  int (*code_size)(Program, size_t*);
  int (*code)(Program, char*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  const char* (*error_string)(int);
};

struct Configuration {
  std::string source_folder;
  std::vector<std::string> libraries;
};

Configuration& Config() {
  static auto* config = new Configuration;
  return *config;
}

template <typename F>
bool Find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

// Loads libnvrtc with the builtins library that lies beside it: libnvrtc asks the loader for that
// one by name, and would not find it inside a Python package.
std::optional<Nvrtc> Open(const std::string& path, std::string* error) {
  const size_t slash = path.rfind('/');
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *error += "\n  " + std::string(dlerror());
    return std::nullopt;
  }
  Nvrtc nvrtc;
  if (!Find(library, "nvrtcVersion", &nvrtc.version) ||
      !Find(library, "nvrtcCreateProgram", &nvrtc.create) ||
      !Find(library, "nvrtcDestroyProgram", &nvrtc.destroy) ||
      !Find(library, "nvrtcAddNameExpression", &nvrtc.add_name) ||
      !Find(library, "nvrtcCompileProgram", &nvrtc.compile) ||
      !Find(library, "nvrtcGetLoweredName", &nvrtc.lowered_name) ||
      !Find(library, "nvrtcGetCUBINSize", &nvrtc.code_size) ||
      !Find(library, "nvrtcGetCUBIN", &nvrtc.code) ||
      !Find(library, "nvrtcGetProgramLogSize", &nvrtc.log_size) ||
      !Find(library, "nvrtcGetProgramLog", &nvrtc.log) ||
      !Find(library, "nvrtcGetErrorString", &nvrtc.error_string)) {
    *error += "\n  " + path + " lacks a function of NVRTC 12 or later";
    return std::nullopt;
  }
  int major = 0, minor = 0;
  nvrtc.version(&major, &minor);
  if (slash != std::string::npos) {
    const std::string builtins = path.substr(0, slash) + "/libnvrtc-builtins.so." +
                                 std::to_string(major) + "." + std::to_string(minor);
    dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL);  // where it is missing, compiling says so
  }
  return nvrtc;
}

const Nvrtc* Library(std::string* error) {
  static std::mutex mutex;
  static std::optional<Nvrtc> nvrtc;
  const std::lock_guard lock(mutex);
  if (nvrtc) return &*nvrtc;
  std::string reasons;
  for (const std::string& path : Config().libraries) {
    nvrtc = Open(path, &reasons);
    if (nvrtc) return &*nvrtc;
  }
  *error = "NVRTC, the CUDA run-time compiler, can't be loaded:" + reasons;
  return nullptr;
}

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A source and the files it includes by #include "...", by their names below the source folder.
using Sources = std::map<std::string, std::string>;

bool Collect(const std::string& name, Sources* sources, std::string* error);

bool CollectIncluded(const std::string& text, Sources* sources, std::string* error) {
  const std::string directive = "#include \"";
  for (size_t at = text.find(directive); at != std::string::npos;
       at = text.find(directive, at + 1)) {
    const size_t begin = at + directive.size();
    if (!Collect(text.substr(begin, text.find('"', begin) - begin), sources, error)) return false;
  }
  return true;
}

bool Collect(const std::string& name, Sources* sources, std::string* error) {
  if (sources->contains(name)) return true;
  const std::optional<std::string> text = ReadFile(Config().source_folder + "/" + name);
  if (!text) {
    *error = "device source " + Config().source_folder + "/" + name + " can't be read";
    return false;
  }
  (*sources)[name] = *text;
  return CollectIncluded(*text, sources, error);
}

bool Collect(const KernelSource& source, Sources* sources, std::string* error) {
  if (source.text.empty()) return Collect(source.file, sources, error);
  (*sources)[source.file] = source.text;
  return CollectIncluded(source.text, sources, error);
}

std::vector<std::string> Options(const std::string& architecture) {
  return {"--gpu-architecture=" + architecture, "--std=c++20",
          "--device-as-default-execution-space"};
}

std::string Log(const Nvrtc& nvrtc, Program program) {
  size_t size = 0;
  nvrtc.log_size(program, &size);
  std::string log(size, '\0');
  if (size > 0) nvrtc.log(program, log.data());
  while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
  return log;
}

}  // namespace

void ConfigureCompiler(std::string source_folder, std::vector<std::string> libraries) {
  Config() = {std::move(source_folder), std::move(libraries)};
}

std::string NvrtcVersion(std::string* error) {
  const Nvrtc* nvrtc = Library(error);
  if (nvrtc == nullptr) return "";
  int major = 0, minor = 0;
  nvrtc->version(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

std::optional<std::string> SourceKey(const KernelSource& source, const std::string& architecture,
                                     std::string* error) {
  Sources sources;
  if (!Collect(source, &sources, error)) return std::nullopt;
  std::string key = source.expression + "\n" + source.file + "\n";
  for (const std::string& option : Options(architecture)) key += option + "\n";
  for (const auto& [name, text] : sources) {
    key += name + " " + std::to_string(text.size()) + "\n" + text;
  }
  return key;
}

std::optional<CompiledKernel> Compile(const KernelSource& source, const std::string& architecture,
                                      std::string* error) {
  const Nvrtc* nvrtc = Library(error);
  Sources sources;
  if (nvrtc == nullptr || !Collect(source, &sources, error)) return std::nullopt;
  std::vector<const char*> texts, names, options;
  for (const auto& [name, text] : sources) {
    if (name == source.file) continue;
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  const std::vector<std::string> values = Options(architecture);
  for (const std::string& value : values) options.push_back(value.c_str());

  Program program = nullptr;
  const auto count = static_cast<int>(names.size());
  int status = nvrtc->create(&program, sources[source.file].c_str(), source.file.c_str(), count,
                             texts.data(), names.data());
  if (status == 0) status = nvrtc->add_name(program, source.expression.c_str());
  if (status == 0) {
    status = nvrtc->compile(program, static_cast<int>(options.size()), options.data());
  }
  std::optional<CompiledKernel> kernel;
  const char* lowered = nullptr;
  size_t size = 0;
  if (status == 0) status = nvrtc->lowered_name(program, source.expression.c_str(), &lowered);
  if (status == 0) status = nvrtc->code_size(program, &size);
  if (status == 0) {
    kernel = CompiledKernel{std::string(size, '\0'), lowered};
    status = nvrtc->code(program, kernel->code.data());
  }
  if (status != 0) {
    *error = "compiling " + source.expression + " of " + source.file + " for " + architecture +
             " failed: " + nvrtc->error_string(status) +
             (program == nullptr ? "" : "\n" + Log(*nvrtc, program));
    kernel.reset();
  }
  if (program != nullptr) nvrtc->destroy(&program);
  return kernel;
}

}  // namespace jaxsparse
