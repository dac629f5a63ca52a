//! `leasehold schema`: the SQL that makes a database store's tables, for people whose migrations own
//! the database. Nothing is connected to.

use std::io::{Write, stdout};
use std::process::ExitCode;

use crate::args::SchemaArgs;
use crate::exit::Failure;

pub(crate) fn main(args: &SchemaArgs) -> ExitCode {
    match printed(args.store.url()) {
        Ok(text) => {
            // A reader that has seen enough is no failure.
            let _ = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
            ExitCode::SUCCESS
        }
        Err(error) => Failure::from(error).report(),
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
fn printed(url: &str) -> leasehold::Result<String> {
    leasehold::store::sql::schema(url)
}

#[cfg(not(any(feature = "sqlite", feature = "postgres", feature = "mysql")))]
fn printed(_: &str) -> leasehold::Result<String> {
    let what = "this build has no database store: enable sqlite, postgres or mysql";
    Err(leasehold::Error::new(leasehold::ErrorKind::Unsupported, what))
}
