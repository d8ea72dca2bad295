// Whether AMX can be used.
#pragma once

namespace duck {

// By the CPU, by the system, and by the unit's order of additions. Asked once.
bool amx_is_usable();

}  // namespace duck
