//! The benchmarks are in `benches`; `docs` of the repository say how to run them.
