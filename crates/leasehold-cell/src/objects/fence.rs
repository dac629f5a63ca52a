//! A fence in an object store, for data such as a table's manifest. The lock itself may be in any
//! store.
//!
//! An object store has one atomic operation: writing an object if it still has the version that was
//! read. So the object itself contains the highest token that has written it, and every write is
//! conditional on the version that was read. [`change`] reads and writes in one step, [`put`]
//! replaces the object, and [`read`] presents the token before you use what you read. All three
//! reject a stale token without writing anything.
//!
//! **The token** is the object's first line, `leasehold fence 1 TOKEN`. It cannot be in the
//! object's metadata, because an `ETag` often depends on the content only, so a condition would not
//! notice a higher token. As part of the content, the token makes the versions of different holders
//! differ. Programs that read the object without this module must skip the first line.
//!
//! **Repeated writes.** A proxy, or the driver after a 5xx, may repeat a write. The repetition is
//! refused although the write succeeded. So each write has a random name, and the object's metadata
//! lists the latest eight names. A client whose write is refused looks for the name of its write in
//! that list. If the name is there, the write succeeded once, and [`change`] does not apply its
//! work again. On stores without metadata, the client cannot find out.
//!
//! **Lost replies.** If the reply to a write is lost, it is unknown whether the write happened.
//! [`put`] may be repeated. Repeat [`change`] only if applying `work` twice has the same result as
//! applying it once.

use leasehold_core::fence::Fence;
use leasehold_core::{ClaimId, Error, ErrorKind, Result};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error as Driver, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    UpdateVersion,
};

use super::fault::{CONDITIONAL, shown};
use crate::fence::Guarded;

/// One object.
struct Object<'a> {
    store: &'a dyn ObjectStore,
    path: &'a Path,
}

/// The metadata entry with the names of an object's latest writes. Azure allows only letters.
const WRITES: &str = "leaseholdwrites";
/// Maximum number of listed writes.
const NAMED: usize = 8;

/// The version of the object that was read, and the writes that made it, latest first.
struct Seen {
    version: UpdateVersion,
    writes: String,
}

impl Object<'_> {
    /// Returns the names of the object's latest writes.
    async fn writes(&self) -> Result<String> {
        match self.store.get(self.path).await {
            Ok(found) => Ok(writes(&found.attributes)),
            Err(Driver::NotFound { .. }) => Ok(String::new()),
            Err(error) => Err(explain(&error)),
        }
    }
}

fn writes(attributes: &Attributes) -> String {
    let named = attributes.get(&Attribute::Metadata(WRITES.into()));
    named.map(|named| named.to_string()).unwrap_or_default()
}

impl Guarded for Object<'_> {
    type Version = Option<Seen>;
    const LOOKS_BEHIND: bool = false;

    async fn look(&self) -> Result<(Option<Vec<u8>>, Self::Version)> {
        let found = match self.store.get(self.path).await {
            Ok(found) => found,
            Err(Driver::NotFound { .. }) => return Ok((None, None)),
            Err(error) => return Err(explain(&error)),
        };
        let version =
            UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
        let writes = writes(&found.attributes);
        let object = found.bytes().await.map_err(|error| explain(&error))?;
        Ok((Some(object.to_vec()), Some(Seen { version, writes })))
    }

    async fn write(&self, value: Vec<u8>, read: &Self::Version) -> Result<bool> {
        let version = read.as_ref().map(|seen| seen.version.clone());
        let mode = version.map_or(PutMode::Create, PutMode::Update);
        let ours = ClaimId::random()?.to_hex();
        let before = read.as_ref().map_or("", |seen| &seen.writes).split_ascii_whitespace();
        let named: Vec<&str> = [&*ours].into_iter().chain(before).take(NAMED).collect();
        // A cache of a public object would return an old token.
        let attributes = Attributes::from_iter([
            (Attribute::CacheControl, "no-store".to_owned()),
            (Attribute::Metadata(WRITES.into()), named.join(" ")),
        ]);
        let options = PutOptions { attributes, ..PutOptions::from(mode) };
        match self.store.put_opts(self.path, value.into(), options).await {
            Ok(_) => Ok(true),
            Err(
                Driver::AlreadyExists { .. }
                | Driver::Precondition { .. }
                | Driver::NotFound { .. },
            ) => Ok(self.writes().await?.split_ascii_whitespace().any(|named| named == ours)),
            Err(error) => Err(explain(&error)),
        }
    }
}

/// Writes an object, unless a holder with a higher token has written it. Two round trips, and two
/// more for each concurrent change.
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened.
///
/// # Errors
/// - [`ErrorKind::StaleToken`] (see [`Error::stale_token`]): nothing was written.
/// - [`ErrorKind::Corrupt`]: the existing object has no token; it was left unchanged.
/// - [`ErrorKind::Conflict`]: other clients changed the object during every attempt.
/// - [`ErrorKind::Unreachable`]: the write may or may not have happened.
/// - The errors of [`Fence::fence`], and any error of the store.
///
/// ```
/// # async fn example(guard: leasehold_core::FencingToken) -> leasehold_core::Result<()> {
/// use leasehold_cell::objects::{fence, object_store};
/// let store = object_store::memory::InMemory::new();
/// let manifest = "table/manifest".into();
/// fence::put(&store, &manifest, &guard, b"[]").await?;
/// # Ok(())
/// # }
/// # let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
/// # runtime.block_on(example(leasehold_core::FencingToken::new(1).unwrap())).unwrap();
/// ```
pub async fn put(
    store: &dyn ObjectStore,
    path: &Path,
    fence: impl Fence,
    value: &[u8],
) -> Result<()> {
    change(store, path, fence, |_| Some(value.to_vec())).await.map(drop)
}

/// Changes an object with `work` and returns the new content.
///
/// `work` gets the current content and returns the new one, or `None` to keep it. It is called
/// again if another client has changed the object in the meantime. Needs as many round trips as
/// [`put`].
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened.
///
/// # Errors
/// The errors of [`put`].
///
/// ```
/// # async fn example(guard: leasehold_core::FencingToken) -> leasehold_core::Result<()> {
/// use leasehold_cell::objects::{fence, object_store};
/// let store = object_store::memory::InMemory::new();
/// // A table's writer adds a file to its manifest, without lost updates and without late writers.
/// let manifest = "table/manifest".into();
/// let files = fence::change(&store, &manifest, &guard, |old| {
///     let mut files = old.unwrap_or_default().to_vec();
///     files.extend_from_slice(b"part-1.parquet\n");
///     Some(files)
/// });
/// assert_eq!(files.await?.as_deref(), Some(&b"part-1.parquet\n"[..]));
/// # Ok(())
/// # }
/// # let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
/// # runtime.block_on(example(leasehold_core::FencingToken::new(1).unwrap())).unwrap();
/// ```
pub async fn change(
    store: &dyn ObjectStore,
    path: &Path,
    fence: impl Fence,
    work: impl FnMut(Option<&[u8]>) -> Option<Vec<u8>>,
) -> Result<Option<Vec<u8>>> {
    crate::fence::change(&Object { store, path }, fence, work).await
}

/// Reads an object and presents the token; from then on no smaller token can write it. Use it when
/// you base other work on the content.
///
/// A missing object has no token, so create it with [`change`]. One round trip if this token was
/// already presented, otherwise two.
///
/// # Cancel safety
/// Not cancel safe: the token may or may not have been presented.
///
/// # Errors
/// The errors of [`put`].
///
/// ```
/// # async fn example(guard: leasehold_core::FencingToken) -> leasehold_core::Result<()> {
/// use leasehold_cell::objects::{fence, object_store};
/// let store = object_store::memory::InMemory::new();
/// assert_eq!(fence::read(&store, &"table/manifest".into(), &guard).await?, None);
/// # Ok(())
/// # }
/// # let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
/// # runtime.block_on(example(leasehold_core::FencingToken::new(1).unwrap())).unwrap();
/// ```
pub async fn read(
    store: &dyn ObjectStore,
    path: &Path,
    fence: impl Fence,
) -> Result<Option<Vec<u8>>> {
    crate::fence::read(&Object { store, path }, fence).await
}

fn explain(error: &Driver) -> Error {
    let (kind, what, hint) = match error {
        Driver::PermissionDenied { .. } | Driver::Unauthenticated { .. } => (
            ErrorKind::Denied,
            "the object store denied access",
            "allow these credentials to read and write the object",
        ),
        Driver::NotImplemented { .. } | Driver::NotSupported { .. } => (
            ErrorKind::Config,
            "this object store does not support conditional writes",
            CONDITIONAL,
        ),
        _ => (ErrorKind::Unreachable, "the object store does not respond", "retry"),
    };
    let error = shown(&error.to_string());
    Error::new(kind, what).with_hint(hint).with_operation("fence").with_source(error)
}

#[cfg(test)]
mod tests {
    use futures_util::stream::BoxStream;
    use leasehold_core::FencingToken;
    use object_store::PutPayload;
    use object_store::memory::InMemory;

    use super::*;

    fn token(n: u64) -> FencingToken {
        FencingToken::new(n).unwrap()
    }

    // R35
    #[tokio::test]
    async fn a_stale_token_changes_no_object() {
        let (store, path) = (InMemory::new(), Path::from("a/b"));
        put(&store, &path, token(5), b"five").await.unwrap();
        put(&store, &path, token(5), b"five again").await.unwrap();
        let error = put(&store, &path, token(4), b"four").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
        let stale = error.stale_token().unwrap();
        assert_eq!((stale.seen, stale.offered), (token(5), token(4)));
        // A read presents its token as well, although the content does not change.
        assert_eq!(read(&store, &path, token(7)).await.unwrap().unwrap(), b"five again");
        let error = change(&store, &path, token(6), |_| Some(vec![])).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
        assert_eq!(read(&store, &path, token(7)).await.unwrap().unwrap(), b"five again");
    }

    // R35
    /// The late writer reads before the next holder writes, and writes after that.
    #[tokio::test]
    async fn writer_that_read_before_the_next_holder_is_refused() {
        let (store, path) = (InMemory::new(), Path::from("a"));
        put(&store, &path, token(5), b"same").await.unwrap();
        let late = Object { store: &store, path: &path };
        let (_, read_before) = late.look().await.unwrap();
        // The next holder writes the same value with a higher token.
        put(&store, &path, token(7), b"same").await.unwrap();
        let value = b"leasehold fence 1 5\nlate".to_vec();
        assert!(!late.write(value, &read_before).await.unwrap());
        assert_eq!(read(&store, &path, token(7)).await.unwrap().unwrap(), b"same");
    }

    /// An object store whose driver or proxy repeats each write, and returns the answer to the
    /// repetition.
    #[derive(Debug)]
    struct Repeating(InMemory);

    impl std::fmt::Display for Repeating {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            self.0.fmt(f)
        }
    }

    #[async_trait::async_trait]
    impl ObjectStore for Repeating {
        async fn put_opts(
            &self,
            path: &Path,
            value: PutPayload,
            options: PutOptions,
        ) -> object_store::Result<object_store::PutResult> {
            let _ = self.0.put_opts(path, value.clone(), options.clone()).await;
            self.0.put_opts(path, value, options).await
        }

        async fn put_multipart_opts(
            &self,
            path: &Path,
            options: object_store::PutMultipartOptions,
        ) -> object_store::Result<Box<dyn object_store::MultipartUpload>> {
            self.0.put_multipart_opts(path, options).await
        }

        async fn get_opts(
            &self,
            path: &Path,
            options: object_store::GetOptions,
        ) -> object_store::Result<object_store::GetResult> {
            self.0.get_opts(path, options).await
        }

        fn delete_stream(
            &self,
            paths: BoxStream<'static, object_store::Result<Path>>,
        ) -> BoxStream<'static, object_store::Result<Path>> {
            self.0.delete_stream(paths)
        }

        fn list(
            &self,
            prefix: Option<&Path>,
        ) -> BoxStream<'static, object_store::Result<object_store::ObjectMeta>> {
            self.0.list(prefix)
        }

        async fn list_with_delimiter(
            &self,
            prefix: Option<&Path>,
        ) -> object_store::Result<object_store::ListResult> {
            self.0.list_with_delimiter(prefix).await
        }

        async fn copy_opts(
            &self,
            from: &Path,
            to: &Path,
            options: object_store::CopyOptions,
        ) -> object_store::Result<()> {
            self.0.copy_opts(from, to, options).await
        }
    }

    /// Two tasks with the same token append the same line. Neither line is lost or written twice.
    #[tokio::test]
    async fn change_is_applied_once_although_a_proxy_repeats_writes() {
        let (store, path) = (Repeating(InMemory::new()), Path::from("a"));
        for lines in 1..=20 {
            let mut came_by = false;
            let append = |old: Option<&[u8]>| Some([old.unwrap_or_default(), b"x\n"].concat());
            if lines % 2 == 0 {
                let rival = Object { store: &store, path: &path };
                let (_, read) = rival.look().await.unwrap();
                change(&store, &path, token(5), append).await.unwrap();
                let value = [b"leasehold fence 1 5\n".as_slice(), &b"x\n".repeat(lines)].concat();
                assert!(
                    !rival.write(value, &read).await.unwrap(),
                    "a task took the other task's write for its own"
                );
            } else {
                change(&store, &path, token(5), |old| {
                    assert!(!std::mem::replace(&mut came_by, true), "the change was made twice");
                    append(old)
                })
                .await
                .unwrap();
            }
            let there = read(&store, &path, token(5)).await.unwrap().unwrap();
            assert_eq!(there, b"x\n".repeat(lines));
        }
    }

    // S90
    #[tokio::test]
    async fn object_without_a_fence_header_is_not_overwritten() {
        let (store, path) = (InMemory::new(), Path::from("a"));
        for foreign in
            ["", "{}", "leasehold fence 1 x\n", "leasehold fence 1 007\n", "leasehold fence 1 7"]
        {
            store.put(&path, PutPayload::from(foreign.to_owned())).await.unwrap();
            let error = put(&store, &path, token(5), b"five").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{foreign}: {error}");
            let kept = store.get(&path).await.unwrap().bytes().await.unwrap();
            assert_eq!(kept, foreign.as_bytes());
        }
    }
}
