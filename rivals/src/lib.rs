//! Nothing: all is in the benchmark.
