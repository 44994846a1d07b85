// The one exception that the core throws on purpose. Python sees it as moet._core.Refusal and the
// rooms turn it into their own named error.
#pragma once
#include <exception>
#include <string>
#include <utility>

namespace moet {

class Refusal : public std::exception {
 public:
  explicit Refusal(std::string message, std::string hint = "")
      : message_(std::move(message)), hint_(std::move(hint)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  const std::string& hint() const noexcept { return hint_; }

 private:
  std::string message_, hint_;
};

}  // namespace moet
