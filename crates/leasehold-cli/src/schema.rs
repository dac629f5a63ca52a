//! `leasehold schema`: the SQL that makes leasehold's tables, for people whose migrations own the
//! database: those of the store, and those that the library's `lock_in`, `once` and `fence::sql` use
//! in the caller's own transactions; or the statements of these, for programs that do not call the library. Nothing
//! is connected to.

use std::io::{Write, stdout};
use std::process::ExitCode;

use crate::args::SchemaArgs;
use crate::exit::Failure;

pub(crate) fn main(args: &SchemaArgs) -> ExitCode {
    match printed(args.store.url(), args) {
        Ok(text) => {
            // A reader that has seen enough is no failure.
            let _ = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
            ExitCode::SUCCESS
        }
        Err(error) => Failure::from(error).report(),
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
fn printed(url: &str, args: &SchemaArgs) -> leasehold::Result<String> {
    use leasehold::database::{self, Dialect};
    use leasehold::{fence, lock_in, once, versioned};

    use crate::args::Tables;
    // Also refuses what is no database's URL.
    let locks = leasehold::store::sql::schema(url)?;
    let dialect = match url.split_once(':').map_or(url, |(scheme, _)| scheme) {
        "sqlite" => Dialect::Sqlite,
        "mysql" | "mariadb" => Dialect::Mysql,
        _ => Dialect::Postgres,
    };
    if args.statements {
        let texts = [lock_in::text, once::text, versioned::text, fence::sql::text];
        return Ok(texts.map(|text| text(dialect)).join("\n"));
    }
    let transactions = database::schema(dialect);
    Ok(match args.tables {
        Tables::Locks => locks,
        Tables::Transactions => transactions,
        Tables::All => format!("{locks}\n{transactions}"),
    })
}

#[cfg(not(any(feature = "sqlite", feature = "postgres", feature = "mysql")))]
fn printed(_: &str, _: &SchemaArgs) -> leasehold::Result<String> {
    let what = "this build has no database store: enable sqlite, postgres or mysql";
    Err(leasehold::Error::new(leasehold::ErrorKind::Unsupported, what))
}
