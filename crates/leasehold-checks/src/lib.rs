//! The examples on these pages of the documentation are tests. The other checks are in `tests`.

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/recipes.md")]
struct Recipes;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/testing.md")]
struct Testing;
