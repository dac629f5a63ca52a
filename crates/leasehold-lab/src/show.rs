//! What was played, as people see it: on a terminal, as a picture, as a page.

pub mod html;
pub mod svg;
pub mod terminal;
mod words;
