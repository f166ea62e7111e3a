#include "dynamic/brackets.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>

namespace jaxsparse {
namespace {

constexpr int32_t kNone = -1;

bool IsSpace(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

class BracketParser {
 public:
  BracketParser(std::string_view text, int64_t slots, const std::vector<std::string>& vocabulary,
                bool closed)
      : text_(text), slots_(slots), closed_(closed) {
    const auto brackets = std::count(text.begin(), text.end(), '(');
    trees_.children.reserve(brackets * slots);
    trees_.labels.reserve(brackets);
    trees_.words.reserve(brackets);
    for (const std::string& word : vocabulary) {
      numbers_.emplace(word, static_cast<int32_t>(numbers_.size()));
    }
    unknown_ = static_cast<int32_t>(numbers_.size());
  }

  std::optional<BracketTrees> Parse(std::string* error) {
    for (SkipSpace(); at_ < text_.size(); SkipSpace()) {
      if (text_[at_] == '(') {
        Open();
      } else if (open_.empty()) {
        fault_ = "text outside of brackets";
      } else if (text_[at_] == ')') {
        Close();
      } else {
        TakeWord();
      }
      if (!fault_.empty()) break;  // before white space, which may end the line that is named
    }
    if (fault_.empty() && !open_.empty()) fault_ = "a bracket is not closed";
    if (fault_.empty()) return std::move(trees_);
    const auto line = 1 + std::count(text_.begin(), text_.begin() + at_, '\n');
    *error = "tree " + std::to_string(trees_.offsets.size() - 1) + ", line " +
             std::to_string(line) + ": " + fault_;
    return std::nullopt;
  }

 private:
  struct Node {
    int32_t label;
    int32_t word = kNone;
    size_t first_child;  // among those that wait for their parents
  };

  void SkipSpace() {
    while (at_ < text_.size() && IsSpace(text_[at_])) ++at_;
  }

  std::string_view Token() {
    const size_t begin = at_;
    while (at_ < text_.size() && !IsSpace(text_[at_]) && text_[at_] != '(' && text_[at_] != ')') {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  void Open() {
    if (!open_.empty() && open_.back().word != kNone) {
      fault_ = "a bracket has a word and further brackets";
      return;
    }
    ++at_;
    SkipSpace();
    const std::string_view token = Token();
    Node node = {.label = 0, .first_child = waiting_.size()};
    const auto [end, code] = std::from_chars(token.data(), token.data() + token.size(), node.label);
    if (token.empty() || code != std::errc() || end != token.data() + token.size() ||
        node.label < 0) {
      fault_ = "a label must be an integer >= 0, got '" + std::string(token) + "'";
      return;
    }
    open_.push_back(node);
  }

  void Close() {
    const Node node = open_.back();
    const size_t count = waiting_.size() - node.first_child;
    if (node.word == kNone && count == 0) {
      fault_ = "a bracket has neither a word nor further brackets";
      return;
    }
    if (static_cast<int64_t>(count) > slots_) {
      fault_ = "a bracket has " + std::to_string(count) + " children, more than the " +
               std::to_string(slots_) + " slots";
      return;
    }
    const auto row = static_cast<int32_t>(trees_.labels.size() - trees_.offsets.back());
    trees_.children.insert(trees_.children.end(), waiting_.begin() + node.first_child,
                           waiting_.end());
    trees_.children.insert(trees_.children.end(), slots_ - count, kNone);
    trees_.labels.push_back(node.label);
    trees_.words.push_back(node.word);
    waiting_.resize(node.first_child);
    open_.pop_back();
    ++at_;
    if (open_.empty()) {
      trees_.offsets.push_back(static_cast<int64_t>(trees_.labels.size()));
    } else {
      waiting_.push_back(row);
    }
  }

  void TakeWord() {
    Node& node = open_.back();
    if (node.word != kNone || waiting_.size() > node.first_child) {
      fault_ = "a bracket has a word and more than that";
      return;
    }
    const std::string_view word = Token();
    const auto known = numbers_.find(word);
    if (known != numbers_.end()) {
      node.word = known->second;
    } else if (closed_) {
      node.word = unknown_;
    } else {
      node.word = static_cast<int32_t>(numbers_.size());
      numbers_.emplace(word, node.word);
      trees_.new_words.emplace_back(word);
    }
  }

  const std::string_view text_;
  const int64_t slots_;
  const bool closed_;
  size_t at_ = 0;
  int32_t unknown_ = 0;
  std::unordered_map<std::string_view, int32_t> numbers_;
  std::vector<Node> open_;
  std::vector<int32_t> waiting_;  // rows of the open brackets' children
  BracketTrees trees_;
  std::string fault_;
};

}  // namespace

std::optional<BracketTrees> ParseBrackets(std::string_view text, int64_t slots,
                                          const std::vector<std::string>& vocabulary, bool closed,
                                          std::string* error) {
  return BracketParser(text, slots, vocabulary, closed).Parse(error);
}

}  // namespace jaxsparse
