//! Values for columns of the caller's own tables, and how they are bound as parameters.

/// A value for a column of your own table.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// `NULL`.
    Null,
    /// An integer.
    Int(i64),
    /// True or false: `BOOLEAN` on PostgreSQL, 1 or 0 elsewhere.
    Bool(bool),
    /// A floating-point number.
    Float(f64),
    /// Text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A value of any other database type, as text; made by [`Value::typed`].
    Typed(Typed),
}

/// A value of any other database type, as text; see [`Value::typed`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Typed {
    pub(super) of: String,
    text: String,
}

impl Value {
    /// Creates a value of another database type from text.
    ///
    /// PostgreSQL does not accept text for a `uuid`, `timestamptz`, `jsonb` or `numeric` column
    /// without a cast, so there it becomes `CAST('…' AS type_name)`. SQLite and MySQL convert the
    /// text to the type of the column. `type_name` consists of letters, digits and `_`
    /// (`schema.type` for your own types). Other names are rejected when the value is first used.
    ///
    /// ```
    /// use leasehold::database::Value;
    /// let key = Value::typed("uuid", "7f1c7a3e-7ac5-4d44-93a8-2f6c5c3f1b11");
    /// let price = Value::typed("numeric", "12.50");
    /// # let _ = (key, price);
    /// ```
    pub fn typed(type_name: impl Into<String>, text: impl Into<String>) -> Self {
        Self::Typed(Typed { of: type_name.into(), text: text.into() })
    }
}

macro_rules! value_from {
    ($($from:ty => $make:expr),+ $(,)?) => {$(
        impl From<$from> for Value {
            fn from(value: $from) -> Self {
                #[allow(clippy::redundant_closure_call)]
                ($make)(value)
            }
        }
    )+};
}
value_from! {
    bool => Value::Bool,
    i64 => Value::Int,
    i32 => |v: i32| Value::Int(v.into()),
    u32 => |v: u32| Value::Int(v.into()),
    f64 => Value::Float,
    String => Value::Text,
    &str => |v: &str| Value::Text(v.into()),
    Vec<u8> => Value::Bytes,
    &[u8] => |v: &[u8]| Value::Bytes(v.into()),
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl Value {
    /// Returns the number, or 0 for any other value.
    pub(crate) fn int(&self) -> i64 {
        if let Self::Int(v) = self { *v } else { 0 }
    }

    /// Returns the text, or an empty string for any other value.
    pub(crate) fn text(self) -> String {
        if let Self::Text(v) = self { v } else { String::new() }
    }
}

/// A parameter of a statement. It is always bound, and never part of the SQL text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Param<'a> {
    /// `NULL`.
    Null,
    /// An integer: `BIGINT`.
    Int(i64),
    /// True or false: `BOOLEAN`.
    Bool(bool),
    /// A floating-point number: `DOUBLE PRECISION`.
    Float(f64),
    /// Text: `TEXT`.
    Text(&'a str),
    /// Bytes: `BYTEA`, `VARBINARY`, `BLOB`.
    Bytes(&'a [u8]),
}

impl Value {
    /// Returns the parameter that is bound for this value.
    pub(crate) fn param(&self) -> Param<'_> {
        match self {
            Self::Null => Param::Null,
            Self::Int(v) => Param::Int(*v),
            Self::Bool(v) => Param::Bool(*v),
            Self::Float(v) => Param::Float(*v),
            Self::Text(v) => Param::Text(v),
            Self::Bytes(v) => Param::Bytes(v),
            Self::Typed(v) => Param::Text(&v.text),
        }
    }
}
