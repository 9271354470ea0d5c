// Formats the replies to straggler probes, and decides when to probe. See
// straggler_probe.h.
#include "engine/communicator/straggler_probe.h"

#include <algorithm>

#include "engine/call/descriptor.h"

namespace ringjax {

std::string Title(const ProbeReply& reply) {
  return "rank " + std::to_string(reply.rank) +
         (reply.host.empty() ? "" : " on " + reply.host);
}

std::string ReplyText(const ProbeReply& reply) {
  if (reply.answered) return reply.text;
  return reply.asked ? "it does not answer" : "";
}

bool AllAnswered(const std::vector<ProbeReply>& replies) {
  return std::none_of(replies.begin(), replies.end(),
                      [](const ProbeReply& r) { return r.asked && !r.answered; });
}

std::string Printable(std::string_view text, size_t limit) {
  std::string shown(Cut(text, limit));
  for (size_t i = 0; i < shown.size(); ++i) {
    const auto c = static_cast<unsigned char>(shown[i]);
    // The control characters U+0080 to U+009F are two bytes in UTF-8.
    const bool high = c == 0xc2 && i + 1 < shown.size() &&
                      static_cast<unsigned char>(shown[i + 1]) < 0xa0;
    if (high) shown.erase(i, 1);
    if (high || c < 0x20 || c == 0x7f) shown[i] = c == '\n' || c == '\t' ? ' ' : '?';
  }
  return shown;
}

bool StallPolicy::MustProbe(double seconds, double warning, double limit) {
  // If the wait is shorter than at the last MustProbe, a new wait has begun.
  if (seconds < last_) probed_ = -1;
  last_ = seconds;
  const double soon = limit - std::min(kEarly, limit / 2);
  const bool before_end = limit > 0 && seconds >= soon && probed_ < soon;
  const double next = std::max(warning, 2 * warned_);
  const bool at_warning = warning > 0 && seconds >= next && probed_ < next;
  if (!before_end && !at_warning) return false;
  probed_ = seconds;
  return true;
}

}  // namespace ringjax
