// See inquiry.h.
#include "engine/communicator/inquiry.h"

#include <algorithm>

#include "engine/call/descriptor.h"

namespace ringjax {

std::string Title(const Sighting& sighting) {
  return "rank " + std::to_string(sighting.rank) +
         (sighting.host.empty() ? "" : " on " + sighting.host);
}

std::string Tale(const Sighting& sighting) {
  if (sighting.answered) return sighting.text;
  return sighting.asked ? "it does not answer" : "";
}

bool AllAnswered(const std::vector<Sighting>& sightings) {
  return std::none_of(sightings.begin(), sightings.end(),
                      [](const Sighting& r) { return r.asked && !r.answered; });
}

std::string Printable(std::string_view text, size_t limit) {
  std::string shown(Cut(text, limit));
  for (size_t i = 0; i < shown.size(); ++i) {
    const auto c = static_cast<unsigned char>(shown[i]);
    // Those of Latin 1 as well, which UTF-8 writes as two bytes.
    const bool high = c == 0xc2 && i + 1 < shown.size() &&
                      static_cast<unsigned char>(shown[i + 1]) < 0xa0;
    if (high) shown.erase(i, 1);
    if (high || c < 0x20 || c == 0x7f) shown[i] = c == '\n' || c == '\t' ? ' ' : '?';
  }
  return shown;
}

bool Patience::MustAsk(double seconds, double warning, double limit) {
  // Something has moved meanwhile: this is another wait.
  if (seconds < last_) asked_ = -1;
  last_ = seconds;
  const double soon = limit - std::min(kEarly, limit / 2);
  const bool before_end = limit > 0 && seconds >= soon && asked_ < soon;
  const double next = std::max(warning, 2 * warned_);
  const bool at_warning = warning > 0 && seconds >= next && asked_ < next;
  if (!before_end && !at_warning) return false;
  asked_ = seconds;
  return true;
}

}  // namespace ringjax
