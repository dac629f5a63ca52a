//! Identifiers and parameter placeholders in statements on the caller's own tables.

use std::borrow::Cow;

use super::dialect::Dialect;
use super::value::Value;
use leasehold_core::{Error, ErrorKind, Result};

/// Returns an identifier of the caller's own schema, quoted.
///
/// Only letters, digits and `_` are accepted, so the text cannot contain anything but an
/// identifier. A table may also be written as `schema.table`.
pub(crate) fn identifier(dialect: Dialect, text: &str) -> Result<String> {
    if !is_identifier(text) {
        let shown: String = text.chars().take(40).collect();
        let what = format!("invalid table or column name {shown:?}");
        let hint = "use letters, digits and _, and begin with a letter or _";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
    }
    let quote = dialect.quote();
    let quoted: Vec<String> = text.split('.').map(|p| format!("{quote}{p}{quote}")).collect();
    Ok(quoted.join("."))
}

/// Returns whether the text is `name` or `schema.name` and needs no quoting.
fn is_identifier(text: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty()
            && part.len() <= 63
            && !part.starts_with(|c: char| c.is_ascii_digit())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    text.split('.').count() <= 2 && text.split('.').all(plain)
}

/// Returns the placeholder for one of the caller's values: `?`, or a cast of it.
pub(crate) fn place(dialect: Dialect, value: &Value) -> Result<Cow<'static, str>> {
    let Value::Typed(typed) = value else { return Ok("?".into()) };
    if !is_identifier(&typed.of) {
        let shown: String = typed.of.chars().take(40).collect();
        let what = format!("invalid type name {shown:?}");
        let hint = "use letters, digits and _, and begin with a letter or _";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
    }
    Ok(match dialect {
        Dialect::Postgres => format!("CAST(? AS {})", typed.of).into(),
        Dialect::Sqlite | Dialect::Mysql => "?".into(),
    })
}

/// Returns `, column = ?` for each column, and appends the values to `with`.
pub(crate) fn assignments(
    dialect: Dialect,
    columns: &[(&str, Value)],
    with: &mut Vec<Value>,
) -> Result<String> {
    let mut sql = String::new();
    for (column, value) in columns {
        let column = identifier(dialect, column)?;
        // NULL is written as a literal, because a bound NULL has a type, which may differ from the
        // type of the column.
        if *value == Value::Null {
            sql.push_str(&format!(", {column} = NULL"));
        } else {
            sql.push_str(&format!(", {column} = {}", place(dialect, value)?));
            with.push(value.clone());
        }
    }
    Ok(sql)
}
