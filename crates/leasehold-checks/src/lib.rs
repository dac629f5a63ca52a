//! Runs the examples on these documentation pages as tests. The other checks are in `tests`.

#[cfg(doctest)]
#[doc = include_str!("../../../docs/faq.md")]
struct Faq;

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/migrating/redisson.md")]
struct Redisson;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/testing.md")]
struct Testing;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/tutorial.md")]
struct Tutorial;
