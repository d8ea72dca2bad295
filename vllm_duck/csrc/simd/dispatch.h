// Which instruction sets this build and this CPU have, where each has a table of
// functions with its name.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

namespace duck {

// Those that are not null, in their order: best first.
template <class Table>
std::vector<const Table*> supported(std::initializer_list<const Table*> tables) {
  std::vector<const Table*> found;
  for (auto* table : tables)
    if (table) found.push_back(table);
  return found;
}

// By name, or the first for an empty name; null if there is none.
template <class Table>
const Table* find(const std::vector<const Table*>& tables, const std::string& name) {
  for (auto* table : tables)
    if (name.empty() || name == table->name) return table;
  return nullptr;
}

}  // namespace duck
