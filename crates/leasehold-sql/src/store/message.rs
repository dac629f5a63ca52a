//! A [script](super::wire::Wire::script) as one message: several statements that the server does one
//! after the other, until one fails.
//!
//! Such a message has no arguments: values are written into it, numbers in digits and text in
//! hexadecimal, whatever is in it; on PostgreSQL, a word of letters and digits as it is, which is read in
//! less time. So no text from outside is ever read as SQL.

use std::fmt::Write;
use std::future::poll_fn;

use futures_core::stream::BoxStream;
use sqlx::{ColumnIndex, Database, Decode, Either, Type};

#[cfg(feature = "mysql")]
use super::wire::Statement;
use super::wire::{Arg, Cell, Row, Step};

/// What is sent, and how its answers are read.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) sql: String,
    /// What the columns of each statement are.
    shapes: Vec<&'static str>,
    /// How many statements each step is.
    steps: Vec<usize>,
}

impl Message {
    /// `write` gives the statements of a step, each with what its columns are.
    pub(super) fn of(
        steps: Vec<Step<'_>>,
        mut write: impl FnMut(Step<'_>) -> Vec<(String, &'static str)>,
    ) -> Self {
        let mut message = Self::default();
        for step in steps {
            let statements = write(step);
            message.steps.push(statements.len());
            for (sql, shape) in statements {
                if !message.shapes.is_empty() {
                    message.sql.push_str("; ");
                }
                message.sql.push_str(&sql);
                message.shapes.push(shape);
            }
        }
        message
    }

    /// Reads the answers of one message, and puts those of the steps that were done into `done`.
    pub(super) async fn read<DB: Database>(
        &self,
        mut answers: BoxStream<'_, sqlx::Result<Either<DB::QueryResult, DB::Row>>>,
        text: fn(&DB::Row, usize) -> sqlx::Result<Option<String>>,
        done: &mut Vec<Vec<Row>>,
    ) -> sqlx::Result<()>
    where
        usize: ColumnIndex<DB::Row>,
        for<'r> i64: Decode<'r, DB> + Type<DB>,
    {
        let (mut shapes, mut steps) = (self.shapes.iter(), self.steps.iter());
        let (mut shape, mut left) = (shapes.next(), steps.next().copied());
        let mut rows = Vec::new();
        while let Some(answer) = poll_fn(|cx| answers.as_mut().poll_next(cx)).await {
            match answer? {
                Either::Right(row) => rows.extend(cells::<DB>(&row, shape.copied(), text)?),
                Either::Left(_) => {
                    shape = shapes.next();
                    left = left.map(|left| left.saturating_sub(1));
                    if left == Some(0) {
                        done.push(std::mem::take(&mut rows));
                        left = steps.next().copied();
                    }
                }
            }
        }
        Ok(())
    }
}

/// A row whose columns are of interest.
fn cells<DB: Database>(
    row: &DB::Row,
    shape: Option<&'static str>,
    text: fn(&DB::Row, usize) -> sqlx::Result<Option<String>>,
) -> sqlx::Result<Option<Row>>
where
    usize: ColumnIndex<DB::Row>,
    for<'r> i64: Decode<'r, DB> + Type<DB>,
{
    let shape = shape.filter(|shape| !shape.is_empty());
    let cell = |(i, kind)| match kind {
        b'i' => sqlx::Row::try_get::<Option<i64>, usize>(row, i).map(Cell::Int),
        _ => text(row, i).map(Cell::Text),
    };
    shape.map(|shape| shape.bytes().enumerate().map(cell).collect()).transpose()
}

/// The words of a step without arguments, statement by statement.
pub(super) fn words(sql: &str) -> Vec<(String, &'static str)> {
    sql.split("; ").map(|sql| (sql.to_owned(), "")).collect()
}

/// The statements of a step, with these values in them; the rows are the last one's.
#[cfg(feature = "mysql")]
pub(super) fn each(
    statement: &Statement,
    args: &[Arg],
    literal: fn(&Arg) -> String,
) -> Vec<(String, &'static str)> {
    let mut all: Vec<_> =
        statement.sql.split("; ").map(|sql| (filled(sql, args, literal), "")).collect();
    if let Some((_, shape)) = all.last_mut() {
        *shape = statement.shape;
    }
    all
}

/// The same statement with these values in it, each written by `literal`.
pub(super) fn filled(sql: &str, args: &[Arg], literal: fn(&Arg) -> String) -> String {
    let mut text = String::with_capacity(sql.len() + 64 * args.len());
    let (mut rest, mut next) = (sql, 0);
    while let Some(at) = rest.find(['?', '$']) {
        text.push_str(&rest[..at]);
        let digits = rest[at + 1..].bytes().take_while(u8::is_ascii_digit).count();
        // It begins a path in JSON.
        if digits == 0 && rest[at..].starts_with('$') {
            text.push('$');
            rest = &rest[at + 1..];
            continue;
        }
        let number = rest[at + 1..at + 1 + digits].parse().unwrap_or(next + 1);
        rest = &rest[at + 1 + digits..];
        next += 1;
        text.push_str(&args.get(number - 1).map_or_else(|| "NULL".to_owned(), literal));
    }
    text.push_str(rest);
    text
}

/// Text in hexadecimal.
pub(super) fn hex(text: &str) -> String {
    text.bytes().fold(String::with_capacity(2 * text.len()), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Whether it is nothing but letters, digits and underscores: in quotes, SQL reads just that in it.
#[cfg(feature = "postgres")]
pub(super) fn is_word(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(arg: &Arg) -> String {
        match arg {
            Arg::Int(n) => n.to_string(),
            Arg::Text(text) | Arg::Name(text) => format!("x'{}'", hex(text)),
        }
    }

    #[test]
    fn what_is_filled_in_is_never_read_as_sql() {
        let args = [Arg::from("'; DROP TABLE x; -- $1 ?"), Arg::Int(-7)];
        let hex = "x'273b2044524f50205441424c4520783b202d2d202431203f'";
        assert_eq!(filled("a = ? AND b = ?", &args, shown), format!("a = {hex} AND b = -7"));
        assert_eq!(filled("b = $2 OR a = $1", &args, shown), format!("b = -7 OR a = {hex}"));
        assert_eq!(filled("JSON($1, '$.a')", &args, shown), format!("JSON({hex}, '$.a')"));
    }

    #[test]
    fn a_step_may_be_several_statements() {
        let steps = vec![Step::Raw("A; B".into()), Step::Raw("C".into())];
        let message = Message::of(steps, |step| match step {
            Step::Raw(sql) => words(&sql),
            Step::Rows(..) | Step::One(..) => Vec::new(),
        });
        assert_eq!((message.sql.as_str(), message.steps), ("A; B; C", vec![2, 1]));
    }
}
