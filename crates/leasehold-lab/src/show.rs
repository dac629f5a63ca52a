//! Ways to show a played story: on a terminal, as a picture, as a page.

pub mod html;
pub mod svg;
pub mod terminal;
mod words;
