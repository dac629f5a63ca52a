//! Sends a [script](super::wire::Wire::script) as one message. The message consists of several
//! statements that the server executes in order until one fails.
//!
//! Such a message has no arguments, so values are written into it. Numbers are written in digits,
//! and all text in hexadecimal. On PostgreSQL, text of only letters, digits and underscores is
//! written as it is, which is parsed faster. So text from outside is never parsed as SQL.

use std::fmt::Write;
use std::future::poll_fn;

use futures_core::stream::BoxStream;
use sqlx::{ColumnIndex, Database, Decode, Either, Type};

#[cfg(feature = "mysql")]
use super::wire::Statement;
use super::wire::{Arg, Cell, Row, Step};

/// The SQL to send, and how to read its answers.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) sql: String,
    /// The column types of each statement.
    shapes: Vec<&'static str>,
    /// The number of statements of each step.
    steps: Vec<usize>,
}

impl Message {
    /// Creates a message. `write` returns the statements of a step, each with its column types.
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

    /// Reads the answers to one message, and adds the rows of the completed steps to `done`.
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

/// Reads a row, or returns `None` if its columns are not needed.
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

/// Returns the statements of a step without arguments.
pub(super) fn words(sql: &str) -> Vec<(String, &'static str)> {
    sql.split("; ").map(|sql| (sql.to_owned(), "")).collect()
}

/// Returns the statements of a step with the step's values filled in. Only the last statement
/// returns rows.
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

/// Returns the statement with the values `args` filled in, each written by `literal`.
pub(super) fn filled(sql: &str, args: &[Arg], literal: fn(&Arg) -> String) -> String {
    let mut text = String::with_capacity(sql.len() + 64 * args.len());
    let (mut rest, mut next) = (sql, 0);
    while let Some(at) = rest.find(['?', '$']) {
        text.push_str(&rest[..at]);
        let digits = rest[at + 1..].bytes().take_while(u8::is_ascii_digit).count();
        // This `$` begins a path in JSON.
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

/// Returns the text in hexadecimal.
pub(super) fn hex(text: &str) -> String {
    text.bytes().fold(String::with_capacity(2 * text.len()), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Returns whether the text consists only of letters, digits and underscores. Such text is safe in
/// SQL quotes.
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
    fn inlined_arguments_are_never_read_as_sql() {
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
