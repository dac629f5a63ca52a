//! The benchmarks are in `benches`. The repository's `docs` explain how to run them.
