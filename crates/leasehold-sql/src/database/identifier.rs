//! Identifiers and places for values in statements on the caller's own tables.

use std::borrow::Cow;

use super::dialect::Dialect;
use super::value::Value;
use leasehold_core::{Error, ErrorKind, Result};

/// An identifier of the caller's own schema, quoted. Only letters, digits and `_`, so that it is
/// an identifier and nothing else; `schema.table` where a table is meant.
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

/// Whether it is `name` or `schema.name`, and needs no quoting.
fn is_identifier(text: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty()
            && part.len() <= 63
            && !part.starts_with(|c: char| c.is_ascii_digit())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    text.split('.').count() <= 2 && text.split('.').all(plain)
}

/// Where a value of the caller's is bound: `?`, or a cast of it.
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

/// `, column = ?` for each column, and the values for it.
pub(crate) fn assignments(
    dialect: Dialect,
    columns: &[(&str, Value)],
    with: &mut Vec<Value>,
) -> Result<String> {
    let mut sql = String::new();
    for (column, value) in columns {
        let column = identifier(dialect, column)?;
        // A bound NULL has a type, which need not be the column's.
        if *value == Value::Null {
            sql.push_str(&format!(", {column} = NULL"));
        } else {
            sql.push_str(&format!(", {column} = {}", place(dialect, value)?));
            with.push(value.clone());
        }
    }
    Ok(sql)
}
