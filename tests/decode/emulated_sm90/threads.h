// What the parts of the emulator share: the threads of the block that runs, and its memory.
#pragma once

#include <cstddef>
#include <functional>

// Gives way to other threads until `done`.
void wait_for(const std::function<bool()>& done);

// Bytes of shared memory of the launch.
size_t shared_size();

// A random choice.
bool toss();

// Before and after a block.
void begin_products(int threads);
void end_products();
