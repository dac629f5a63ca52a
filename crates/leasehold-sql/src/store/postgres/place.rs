//! Finds the tables of a PostgreSQL store, and verifies that each connection leads to them.
//!
//! # What could go wrong
//! - *Another schema.* A table's bare name is resolved by the session's `search_path`. For another
//!   role, in a pool that sets `search_path`, or in a pooler's session in which another program has
//!   set it, the name may lead to other tables. Clients of different tables do not exclude each
//!   other.
//! - *Operators of other users.* Operators and functions are looked up in all schemas of the
//!   `search_path`. An exact match in the last schema takes precedence over a conversion in
//!   `pg_catalog`. A role that can create operators or functions in any of these schemas could run
//!   code as leasehold's user, and could decide what the time is.
//! - *Another server.* A host name may lead to another cluster by the time of the next connection.
//!
//! # What is done
//! - The first connection finds the tables (`Place`). It uses the settings of the role and the
//!   database (`reset_val`) and the URL, and ignores later changes to the session. All statements
//!   name the tables with that schema.
//! - Each of our sessions has `search_path = pg_catalog, pg_temp` from its first message on. So a
//!   bare name finds only the server's own objects, and no role's schema is searched. (`pg_temp` is
//!   named so that it comes last. It is searched for tables only.) For a session that is borrowed
//!   or belongs to a pooler, this is set in each transaction, in the same message as BEGIN.
//! - The same message checks the cluster and the database (`pg_control_system()`). Every role may
//!   call that function unless an administrator has revoked the permission. In that case, neither
//!   is checked. A connection to another cluster or database is refused. All idle connections are
//!   closed, because they lead to the former server. A promoted standby has the same identifier. A
//!   transaction on a borrowed connection fails before its first statement.
//! - Tables are created only if this database has none. Tables in another schema are probably the
//!   ones that other clients use. If several schemas of the `search_path` have tables, the URL has
//!   to name one.
//!
//! All this costs no round trips except one for each new connection.

use std::collections::BTreeMap;

use sqlx::Row;
use sqlx::postgres::{PgConnection, PgRow};

use super::elsewhere::{ELSEWHERE, OTHER};
use crate::store::fault;
use crate::store::statements::LIMITS_POOLED;
use crate::store::url::SqlUrl;
use crate::store::version;
use leasehold_core::{Error, ErrorKind};

/// The search path that finds only the server's own objects.
const PIN: &str = "search_path = pg_catalog, pg_temp";

/// The location of a store's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::store) struct Place {
    /// The schema's name, as written in SQL.
    pub(in crate::store) schema: String,
    /// The cluster and the database, if this role may read them.
    identity: Option<Identity>,
    /// The role's setting of `synchronous_commit`.
    commit: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Identity {
    cluster: i64,
    database: i64,
}

/// The query for the cluster and the database.
const ASK: &str = "SELECT c.system_identifier::text, d.oid::text FROM pg_control_system() c, \
                   pg_database d WHERE d.datname = current_database()";

fn text(row: &PgRow, i: usize) -> sqlx::Result<String> {
    Ok(row.try_get::<Option<String>, _>(i)?.unwrap_or_default())
}

fn number(row: &PgRow, i: usize) -> sqlx::Result<i64> {
    text(row, i)?.parse().map_err(|_| sqlx::Error::RowNotFound)
}

async fn send(connection: &mut PgConnection, sql: String) -> sqlx::Result<Vec<PgRow>> {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).fetch_all(connection).await
}

/// Returns a message that runs `sql` with the search path [`PIN`]. The path is set for the session,
/// or for one transaction if the session is not ours.
fn pinned(is_ours: bool, sql: &str) -> String {
    match is_ours {
        true => format!("SET {PIN}; {sql}"),
        false => format!("BEGIN; SET LOCAL {PIN}; {sql}; COMMIT"),
    }
}

/// Sets the search path of a new connection, and refuses a connection that leads to another
/// database. `known` is the location that an earlier connection has found. Without it, this
/// connection finds the tables.
pub(in crate::store) async fn arrive(
    connection: &mut PgConnection,
    url: &SqlUrl,
    known: Option<&Place>,
) -> sqlx::Result<Place> {
    let is_ours = !url.pooler;
    let Some(known) = known else {
        // The version is read in a separate query, because other products may not understand the
        // queries below.
        let version = send(connection, "SELECT pg_catalog.version()".into()).await?;
        let version = version.first().map(|row| text(row, 0)).transpose()?.unwrap_or_default();
        if let Some(error) = version::other_product(&version, "PostgreSQL") {
            return Err(fault::refused(error));
        }
        let rows = send(connection, pinned(is_ours, &questions(url))).await?;
        let identity = identity(connection, is_ours).await?;
        return found(url, &rows, identity);
    };
    let Some(expected) = &known.identity else {
        if is_ours {
            send(connection, format!("SET {PIN}")).await?;
        }
        return Ok(known.clone());
    };
    let rows = send(connection, pinned(is_ours, ASK)).await?;
    match rows.first().map(identity_of).transpose()? {
        Some(identity) if identity == *expected => Ok(known.clone()),
        _ => Err(fault::changed(ELSEWHERE.to_owned())),
    }
}

fn identity_of(row: &PgRow) -> sqlx::Result<Identity> {
    // The identifier is an unsigned 64-bit number that the server shows as signed.
    Ok(Identity { cluster: number(row, 0)?, database: number(row, 1)? })
}

async fn identity(connection: &mut PgConnection, is_ours: bool) -> sqlx::Result<Option<Identity>> {
    match send(connection, pinned(is_ours, ASK)).await {
        Ok(rows) => rows.first().map(identity_of).transpose(),
        Err(error) if fault::is_denied(&error) => {
            if !is_ours {
                send(connection, "ROLLBACK".into()).await?;
            }
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns the queries for the role's settings and the existing schemas.
fn questions(url: &SqlUrl) -> String {
    format!(
        "SELECT s.reset_val, current_user::text, current_setting('synchronous_commit') FROM pg_settings s \
         WHERE s.name = 'search_path'; \
         SELECT n.nspname::text, quote_ident(n.nspname::text), has_schema_privilege(n.oid, 'USAGE')::text, \
         (EXISTS (SELECT 1 FROM pg_class c WHERE c.relnamespace = n.oid AND c.relname = '{}locks'::name \
         AND c.relkind IN ('r', 'p', 'v', 'f')))::text FROM pg_namespace n",
        url.prefix
    )
}

/// A schema of the database.
struct Schema {
    quoted: String,
    usable: bool,
    has_tables: bool,
}

fn found(url: &SqlUrl, rows: &[PgRow], identity: Option<Identity>) -> sqlx::Result<Place> {
    let (first, rest) = rows.split_first().ok_or(sqlx::Error::RowNotFound)?;
    let (path, user, commit) = (text(first, 0)?, text(first, 1)?, text(first, 2)?);
    let mut schemas = BTreeMap::new();
    for row in rest {
        let schema = Schema {
            quoted: text(row, 1)?,
            usable: text(row, 2)? == "true",
            has_tables: text(row, 3)? == "true",
        };
        schemas.insert(text(row, 0)?, schema);
    }
    let chosen = chosen(url.schema.as_deref(), &searched(&path, &user), &schemas);
    Ok(Place { schema: chosen.map_err(fault::refused)?, identity, commit })
}

/// Returns the schemas of a `search_path`, in order.
fn searched(path: &str, user: &str) -> Vec<String> {
    let (mut all, mut name, mut quoted, mut was_quoted) = (Vec::new(), String::new(), false, false);
    for c in path.chars().chain([',']) {
        match c {
            // A doubled quote is part of the name.
            '"' => {
                if !quoted && was_quoted && !name.is_empty() {
                    name.push('"');
                }
                quoted = !quoted;
                was_quoted = true;
            }
            ',' if !quoted => {
                let full = match was_quoted {
                    true => name.clone(),
                    false => name.trim().to_lowercase(),
                };
                let full = if full == "$user" { user.to_owned() } else { full };
                if !full.is_empty() && !all.contains(&full) {
                    all.push(full);
                }
                name.clear();
                was_quoted = false;
            }
            c if !quoted && c.is_whitespace() => {}
            c => name.push(c),
        }
    }
    all
}

/// Returns the schema that has the tables, or in which they are to be created.
fn chosen(
    named: Option<&str>,
    path: &[String],
    schemas: &BTreeMap<String, Schema>,
) -> Result<String, Error> {
    let refused = |what: String| Err(Error::new(ErrorKind::Config, what));
    if let Some(name) = named {
        return match schemas.get(name) {
            Some(schema) => Ok(schema.quoted.clone()),
            // Use the name unchanged. The error that follows names it.
            None => Ok(name.to_owned()),
        };
    }
    let with: Vec<(&String, &Schema)> =
        path.iter().filter_map(|name| schemas.get_key_value(name)).collect();
    let have: Vec<_> = with.iter().filter(|(_, schema)| schema.has_tables).collect();
    let hint = |names: &[&str]| {
        let all: Vec<_> = names.iter().map(|name| format!("schema={name}")).collect();
        all.join(" or ")
    };
    let (name, schema) = match have[..] {
        [(name, schema)] => (*name, *schema),
        [] => {
            let elsewhere: Vec<&str> = schemas
                .iter()
                .filter(|(_, schema)| schema.has_tables)
                .map(|(name, _)| name.as_str())
                .collect();
            let first = with.iter().find(|(_, schema)| schema.usable);
            if !elsewhere.is_empty() {
                return refused(format!(
                    "leasehold's tables are in the schema {}, but not in this user's search_path: \
                     add {} to the URL, or schema= with another name for separate locks",
                    elsewhere.join(" and in "),
                    hint(&elsewhere)
                ));
            }
            match first {
                Some((name, schema)) => (*name, *schema),
                None => {
                    return refused(
                        "no schema of this user's search_path exists or may be used: add schema= to the URL".into(),
                    );
                }
            }
        }
        _ => {
            let names: Vec<&str> = have.iter().map(|(name, _)| name.as_str()).collect();
            return refused(format!(
                "leasehold's tables are in the schemas {}, whose locks do not exclude each other: add {} to the URL",
                names.join(" and "),
                hint(&names)
            ));
        }
    };
    if !is_plain(name) {
        return refused(format!(
            "the schema name {name:?} contains characters that leasehold does not support: add schema= \
             with another name to the URL"
        ));
    }
    Ok(schema.quoted.clone())
}

/// Returns whether the name can be written unchanged into statements, including their string
/// literals.
fn is_plain(name: &str) -> bool {
    name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ' ' | '@'))
}

impl Place {
    /// Returns the SQL that begins a transaction on a session that is not ours. In that
    /// transaction, bare names find only the server's own objects. The SQL fails on another server.
    pub(in crate::store) fn begin(&self, is_borrowed: bool) -> String {
        let mut begin =
            format!("BEGIN ISOLATION LEVEL READ COMMITTED; {LIMITS_POOLED}; SET LOCAL {PIN}");
        // Borrowed sessions must commit as durably as the guarantees state.
        let word = self.commit.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        if is_borrowed && word && !self.commit.is_empty() {
            begin.push_str(&format!("; SET LOCAL synchronous_commit = '{}'", self.commit));
        }
        if let Some(Identity { cluster, database }) = &self.identity {
            begin.push_str(&format!(
                "; SELECT CAST(CASE WHEN c.system_identifier = '{cluster}'::bigint AND d.oid = '{database}'::oid \
                 THEN '0' ELSE '{OTHER}' END AS int4) FROM pg_control_system() c, pg_database d \
                 WHERE d.datname = current_database()"
            ));
        }
        begin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_path_is_read_as_the_server_reads_it() {
        for (path, expected) in [
            ("\"$user\", public", vec!["app", "public"]),
            ("", vec![]),
            ("\"\"", vec![]),
            ("Shop,  \"My App\"", vec!["shop", "My App"]),
            ("\"a,b\", \"a\"\"b\"", vec!["a,b", "a\"b"]),
            ("public, \"$user\", public", vec!["public", "app"]),
        ] {
            assert_eq!(searched(path, "app"), expected, "{path}");
        }
    }

    fn schemas(all: &[(&str, bool, bool)]) -> BTreeMap<String, Schema> {
        let schema = |(name, usable, has_tables): &(&str, bool, bool)| {
            let schema =
                Schema { quoted: (*name).to_owned(), usable: *usable, has_tables: *has_tables };
            ((*name).to_owned(), schema)
        };
        all.iter().map(schema).collect()
    }

    #[test]
    fn existing_tables_are_used_and_missing_ones_are_created() {
        let path = ["app".to_owned(), "public".to_owned()];
        let choose = |all: &[(&str, bool, bool)]| chosen(None, &path, &schemas(all));
        let is = |schema: &str| Ok::<_, String>(schema.to_owned());
        let choice = |done: Result<String, Error>| done.map_err(|error| error.to_string());
        assert_eq!(choice(choose(&[("public", true, true)])), is("public"));
        assert_eq!(choice(choose(&[("public", true, false)])), is("public"));
        assert_eq!(choice(choose(&[("app", true, false), ("public", true, false)])), is("app"));
        // A user's own schema does not shadow the schema that has the tables.
        assert_eq!(choice(choose(&[("app", true, false), ("public", true, true)])), is("public"));
        assert_eq!(choice(choose(&[("app", true, true), ("other", true, true)])), is("app"));
        // This holds even if the user may not use that schema. The error is then a missing
        // permission.
        assert_eq!(choice(choose(&[("app", true, false), ("public", false, true)])), is("public"));
        for (all, names) in [
            (vec![("app", true, true), ("public", true, true)], "schema=app or schema=public"),
            (vec![("app", true, false), ("other", true, true)], "schema=other"),
            (vec![("other", true, false)], "add schema="),
        ] {
            let error = choose(&all).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(names), "{error}");
            assert_eq!(error.to_string().lines().count(), 1);
        }
        let all = schemas(&[("app", true, true), ("public", true, true)]);
        assert_eq!(choice(chosen(Some("public"), &path, &all)), is("public"));
    }

    #[test]
    fn names_that_could_be_sql_are_refused() {
        for bad in ["o'brien", "a\"b", "a;b", "a$1", "a?", "a\\b", "a{b"] {
            assert!(!is_plain(bad), "{bad}");
        }
        assert!(is_plain("Café-1"));
    }
}
