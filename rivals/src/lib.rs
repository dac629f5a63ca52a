//! This library is empty. All code is in the benchmark.
