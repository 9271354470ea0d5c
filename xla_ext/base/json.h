// Quotes and escapes text as a JSON string.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace ringjax {

inline std::string Quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace ringjax
