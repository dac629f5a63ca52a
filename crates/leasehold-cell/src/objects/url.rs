//! The store's URL:
//! `s3://bucket/folder?region=…&endpoint=https://…&anonymous=yes&session_ms=…&poll_ms=…`, and
//! `gs://bucket/folder` and `az://container/folder?account=…` with the same parameters.
//!
//! The URL never contains credentials. object_store finds them in the environment.

use std::time::Duration;

use leasehold_core::kit::UrlParts;
use leasehold_core::{Error, ErrorKind, Result};

use crate::keys::{invalid, invalid_name};
use crate::store::Options;

/// The default folder.
const FOLDER: &str = "leasehold";
/// Maximum length of the folder.
const LONGEST: usize = 200;
/// Default for the longest pause between two polls, each of which is billed.
const POLL: Duration = Duration::from_secs(1);
/// Minimum and maximum of the time limit for a reply, which depends on the interval between
/// renewals of the session.
const ANSWER: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)];
/// Not used, because the endpoint is a separate URL.
const PORT: u16 = 443;

/// The provider of the object store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cloud {
    /// Amazon S3, or a server with the same protocol.
    #[cfg(feature = "s3")]
    S3 { region: Option<String> },
    /// Google Cloud Storage.
    #[cfg(feature = "gs")]
    Gs,
    /// Azure Blob Storage.
    #[cfg(feature = "az")]
    Az { account: Option<String>, is_emulator: bool },
}

impl Cloud {
    /// Takes the provider's own parameters from the URL.
    fn take(scheme: &str, parts: &mut UrlParts) -> Result<Self> {
        match scheme {
            #[cfg(feature = "s3")]
            "s3" => Ok(Self::S3 { region: parts.take("region") }),
            #[cfg(feature = "gs")]
            "gs" => {
                // `gs:` has only the common parameters.
                let _ = parts;
                Ok(Self::Gs)
            }
            #[cfg(feature = "az")]
            "az" => {
                let account = parts.take("account");
                Ok(Self::Az { account, is_emulator: yes(parts, "emulator")? })
            }
            _ => refused("unknown scheme of an object store", "use s3:, gs: or az:"),
        }
    }

    pub(super) fn scheme(&self) -> &'static str {
        match self {
            #[cfg(feature = "s3")]
            Self::S3 { .. } => "s3",
            #[cfg(feature = "gs")]
            Self::Gs => "gs",
            #[cfg(feature = "az")]
            Self::Az { .. } => "az",
        }
    }

    /// Returns the prefix of the environment variables for credentials.
    pub(super) fn variables(&self) -> &'static str {
        match self {
            #[cfg(feature = "s3")]
            Self::S3 { .. } => "AWS_",
            #[cfg(feature = "gs")]
            Self::Gs => "GOOGLE_",
            #[cfg(feature = "az")]
            Self::Az { .. } => "AZURE_",
        }
    }

    /// Returns a hint about how to set credentials.
    pub(super) fn credentials(&self) -> &'static str {
        match self {
            #[cfg(feature = "s3")]
            Self::S3 { .. } => "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            #[cfg(feature = "gs")]
            Self::Gs => "set GOOGLE_APPLICATION_CREDENTIALS to the path of a key file",
            #[cfg(feature = "az")]
            Self::Az { .. } => "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        }
    }

    /// Returns whether the environment has credentials.
    pub(super) fn has_credentials(&self) -> bool {
        let variable = match self {
            #[cfg(feature = "s3")]
            Self::S3 { .. } => "AWS_ACCESS_KEY_ID",
            #[cfg(feature = "gs")]
            Self::Gs => "GOOGLE_APPLICATION_CREDENTIALS",
            #[cfg(feature = "az")]
            Self::Az { .. } => "AZURE_STORAGE_ACCOUNT_KEY",
        };
        std::env::var_os(variable).is_some_and(|value| !value.is_empty())
    }

    /// Returns a hint about credentials that are not read.
    pub(super) fn not_read(&self) -> &'static str {
        match self {
            #[cfg(feature = "s3")]
            Self::S3 { .. } => {
                "AWS profiles and SSO are not read: export them with eval \"$(aws configure export-credentials \
                 --format env)\""
            }
            #[cfg(feature = "gs")]
            Self::Gs => {
                "run gcloud auth application-default login, or give the machine a service account"
            }
            #[cfg(feature = "az")]
            Self::Az { .. } => {
                "sessions of az login are not read: set a key, or give the machine an identity"
            }
        }
    }

    /// Returns what to set for a bucket that requires a checksum or encryption.
    pub(super) fn demands(&self) -> &'static str {
        match self {
            #[cfg(feature = "s3")]
            Self::S3 { .. } => {
                "AWS_CHECKSUM_ALGORITHM=SHA256, AWS_SERVER_SIDE_ENCRYPTION (aws:kms or AES256) and AWS_SSE_KMS_KEY_ID"
            }
            #[cfg(feature = "gs")]
            Self::Gs => "a default key on the bucket",
            #[cfg(feature = "az")]
            Self::Az { .. } => "an encryption scope on the container",
        }
    }

    /// Returns the permissions that locks need.
    pub(super) fn rights(&self) -> &'static str {
        match self {
            #[cfg(feature = "s3")]
            Self::S3 { .. } => {
                "s3:GetObject, s3:PutObject and s3:DeleteObject on its objects, and s3:ListBucket \
                 on the bucket (without it, S3 reports a missing object as forbidden)"
            }
            #[cfg(feature = "gs")]
            Self::Gs => "storage.objects.get, create, delete and list (role Storage Object User)",
            #[cfg(feature = "az")]
            Self::Az { .. } => {
                "reading, writing, deleting and listing blobs (role Storage Blob Data Contributor)"
            }
        }
    }

    fn form(scheme: &str) -> &'static str {
        match scheme {
            "gs" => "gs://bucket or gs://bucket/folder",
            "az" => "az://container or az://container/folder?account=name",
            _ => "s3://bucket or s3://bucket/folder?region=eu-central-1",
        }
    }

    fn known(&self) -> &'static str {
        match self {
            #[cfg(feature = "s3")]
            Self::S3 { .. } => "region, endpoint, anonymous, session_ms and poll_ms",
            #[cfg(feature = "gs")]
            Self::Gs => "endpoint, anonymous, session_ms and poll_ms",
            #[cfg(feature = "az")]
            Self::Az { .. } => "account, endpoint, emulator, anonymous, session_ms and poll_ms",
        }
    }
}

/// The parts of an object store's URL.
#[derive(Clone, Debug)]
pub(super) struct ObjectsUrl {
    pub(super) cloud: Cloud,
    pub(super) bucket: String,
    /// The prefix of all keys, which ends with a slash.
    pub(super) prefix: String,
    pub(super) endpoint: Option<String>,
    /// The proxy for the endpoint, if there is one.
    pub(super) way: Option<String>,
    /// Whether requests are unsigned.
    pub(super) is_anonymous: bool,
    pub(super) session: Duration,
    pub(super) poll: Duration,
}

fn refused<T>(what: impl Into<String>, hint: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, what).with_hint(hint.into()))
}

/// Returns whether a parameter is `yes`; the default is `no`.
fn yes(parts: &mut UrlParts, key: &str) -> Result<bool> {
    match parts.take(key).as_deref() {
        None | Some("no") => Ok(false),
        Some("yes") => Ok(true),
        Some(other) => refused(invalid(key, other), "use yes or no"),
    }
}

impl ObjectsUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
        let form = Cloud::form(scheme);
        let mut parts = UrlParts::parse(url, form, PORT)?;
        let cloud = Cloud::take(scheme, &mut parts)?;
        let millis = |n: Option<u64>| n.map(Duration::from_millis);
        let endpoint = parts.take("endpoint");
        let is_anonymous = yes(&mut parts, "anonymous")?;
        let session = parts.number("session_ms", 2_000, 3_600_000)?;
        let session = millis(session).unwrap_or(Options::default().session);
        let poll = millis(parts.number("poll_ms", 1, 60_000)?).unwrap_or(POLL);
        parts.done(cloud.known())?;
        if parts.user.is_some() || parts.password.is_some() {
            return refused(
                "the URL contains credentials",
                format!(
                    "remove them from the URL and {}, or give the machine a role",
                    cloud.credentials()
                ),
            );
        }
        let bucket = match parts.hosts.as_slice() {
            [host] if host.port == PORT => host.name.clone(),
            _ => {
                return refused("the URL must name exactly one bucket", format!("use {form}"));
            }
        };
        if let Some(endpoint) = endpoint.as_deref().filter(|endpoint| !is_endpoint(endpoint)) {
            return refused(
                invalid("endpoint", endpoint),
                "use http://host:port or https://host:port, without credentials",
            );
        }
        let prefix = folder(&parts.path)?;
        let way = None;
        Ok(Self { cloud, bucket, prefix, endpoint, way, is_anonymous, session, poll })
    }

    /// Returns the time limit for a reply, including a new connection.
    pub(super) fn limit(&self) -> Duration {
        (self.session / 5).clamp(ANSWER[0], ANSWER[1])
    }

    /// Returns the bucket and the endpoint, for error messages and to distinguish the marks of
    /// different endpoints.
    pub(super) fn place(&self) -> String {
        let Self { cloud, bucket, endpoint, .. } = self;
        let scheme = cloud.scheme();
        match endpoint {
            Some(endpoint) => format!("{scheme}://{bucket} at {endpoint}"),
            None => format!("{scheme}://{bucket}"),
        }
    }
}

/// Returns the prefix of all keys.
fn folder(path: &str) -> Result<String> {
    let folder = match path.trim_matches('/') {
        "" => FOLDER,
        folder => folder,
    };
    let is_plain = |part: &str| {
        !matches!(part, "" | "." | "..")
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.=".contains(&b))
    };
    if folder.len() > LONGEST || !folder.split('/').all(is_plain) {
        return refused(
            invalid_name("folder", folder),
            format!(
                "use at most {LONGEST} letters, digits, -, _, . and =, in parts separated by single \
                 slashes"
            ),
        );
    }
    Ok(format!("{folder}/"))
}

fn is_endpoint(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    rest.is_some_and(|rest| {
        !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_graphic() && !b"@?#\"<>\\".contains(&b))
    })
}

#[cfg(all(test, feature = "s3", feature = "gs", feature = "az"))]
mod tests {
    use super::*;

    #[test]
    fn url_parts_and_parameters_are_parsed() {
        let url = ObjectsUrl::parse("s3://locks").unwrap();
        assert_eq!((url.bucket.as_str(), url.prefix.as_str()), ("locks", "leasehold/"));
        assert_eq!((url.endpoint, url.is_anonymous), (None, false));
        assert_eq!(url.cloud, Cloud::S3 { region: None });
        assert_eq!((url.session, url.poll), (Options::default().session, POLL));
        let url = "s3://my.locks/a/b-1/?region=eu-central-1&endpoint=http%3A%2F%2F127.0.0.1:8333&anonymous=yes\
                   &session_ms=5000&poll_ms=20";
        let url = ObjectsUrl::parse(url).unwrap();
        assert_eq!((url.bucket.as_str(), url.prefix.as_str()), ("my.locks", "a/b-1/"));
        assert_eq!(url.place(), "s3://my.locks at http://127.0.0.1:8333");
        assert!(url.is_anonymous);
        assert_eq!(url.cloud, Cloud::S3 { region: Some("eu-central-1".into()) });
        assert_eq!((url.session.as_millis(), url.poll.as_millis()), (5_000, 20));
        let url = ObjectsUrl::parse("gs://locks/jobs").unwrap();
        assert_eq!((url.cloud.clone(), url.prefix.as_str()), (Cloud::Gs, "jobs/"));
        assert_eq!(url.place(), "gs://locks");
        let url = ObjectsUrl::parse("az://locks?account=acme").unwrap();
        let (account, is_emulator) = (Some("acme".into()), false);
        assert_eq!(url.cloud, Cloud::Az { account, is_emulator });
        let url = ObjectsUrl::parse("az://locks?emulator=yes").unwrap();
        assert_eq!(url.cloud, Cloud::Az { account: None, is_emulator: true });
    }

    // S94
    #[test]
    fn bad_urls_are_refused_in_one_line_without_secrets() {
        for (bad, says) in [
            ("s3:locks", "use "),
            ("s3://", "use "),
            ("s3://a,b", "one bucket"),
            ("s3://key:sekret@locks", "the URL contains credentials"),
            ("s3://locks/a//b", "folder \"a//b\""),
            ("s3://locks/a/../b", "folder \"a/../b\""),
            ("s3://locks/a%20b", "folder \"a b\""),
            ("s3://locks?anonymous=1", "\"1\" for anonymous"),
            ("s3://locks?endpoint=localhost:8333", "use http://host:port or https://host:port"),
            ("s3://locks?endpoint=http://u:sekret@h", "percent-encode"),
            ("s3://locks?endpoint=http://u:sekret%40h", "invalid value for endpoint"),
            ("s3://locks?poll_ms=0", "for poll_ms"),
            ("s3://locks?session_ms=100", "for session_ms"),
            ("s3://locks?prefix=a", "known parameters: region"),
            ("gs://locks?region=a", "known parameters: endpoint"),
            ("gs://key:sekret@locks", "GOOGLE_APPLICATION_CREDENTIALS"),
            ("az://locks?emulator=1", "\"1\" for emulator"),
            ("az://a,b", "az://container"),
            ("http://locks", "s3:, gs: or az:"),
        ] {
            let error = ObjectsUrl::parse(bad).map(drop).unwrap_err();
            let message = format!("{error:#}");
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(message.contains(says) && message.lines().count() == 1, "{bad}: {message}");
            assert!(!message.contains("sek"), "{message}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_parsed_or_refused_in_one_line(url in testbed::texts(&[
            "s3://b/f?region=r&endpoint=http%3A%2F%2Fh&anonymous=no&session_ms=5000&poll_ms=20",
            "gs://b/f", "az://c/f?account=a&emulator=yes",
        ])) {
            if let Err(error) = ObjectsUrl::parse(&url).map(drop) {
                proptest::prop_assert_eq!(format!("{error:#}").lines().count(), 1);
            }
        }
    }
}
