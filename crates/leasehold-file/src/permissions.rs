//! The permissions of the store's files, and the user ID that accesses them.
//!
//! The root directory determines the permissions. A user that may write to it may read and write
//! the files in it, and no other user may. (The files contain claim ids, and anyone who knows an id
//! can release the claim.) So every new file gets the root's group, the root's permissions for the
//! group, and the root's sticky bit, independent of the client's umask and group. If an
//! administrator extends the root's permissions later, each client updates its own files when it
//! opens them.
//!
//! Root in another user's store acts as that user, with `setfsuid`. Otherwise the owner could not
//! access files that root created, and a path that a user controls could lead root elsewhere.

use std::fs::{File, Metadata, Permissions};
use std::marker::PhantomData;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use nix::unistd::{Gid, Uid, setfsgid, setfsuid};

/// Permissions of each file of a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct FilePermissions {
    files: u32,
    sticky: bool,
    group: u32,
    me: u32,
}

impl FilePermissions {
    /// Returns the permissions for files of the store whose root directory has this metadata.
    pub(super) fn of(root: &Metadata, acting: Acting) -> Self {
        let mode = root.mode();
        Self {
            files: files_below(mode),
            sticky: mode & 0o1000 != 0,
            group: root.gid(),
            me: acting.0.map_or_else(|| rustix::process::geteuid().as_raw(), |(uid, _)| uid),
        }
    }

    #[cfg(test)]
    pub(super) fn private() -> Self {
        Self { files: 0o600, sticky: false, group: 0, me: rustix::process::geteuid().as_raw() }
    }

    /// Returns whether more than one user is meant to use the store.
    pub(super) fn is_shared(self) -> bool {
        self.files != 0o600
    }

    pub(super) fn file_mode(self) -> u32 {
        self.files
    }

    /// Returns the mode of an inbox. Other users may write to it, but only its client may read it,
    /// because a reader counts as the living client.
    pub(super) fn inbox_mode(self) -> u32 {
        0o600 | (self.files & 0o022)
    }

    pub(super) fn directory_mode(self) -> u32 {
        let open = self.files | (self.files & 0o444) >> 2;
        let group = if self.is_of_group() { 0o2000 } else { 0 };
        let sticky = if self.is_shared() && self.sticky { 0o1000 } else { 0 };
        open | group | sticky
    }

    /// Returns whether files need the store's group. If all users may write, the group has no
    /// effect.
    fn is_of_group(self) -> bool {
        self.files & 0o066 == 0o060
    }

    /// Makes a new file accessible to the store's users. If the client is not in the store's group,
    /// it cannot give the file to that group. Then the file keeps the group that it got from its
    /// directory, or other users get an error.
    pub(super) fn share(self, file: &File, mode: u32) {
        if self.is_shared() {
            let _ = std::os::unix::fs::fchown(file, None, Some(self.group));
            let _ = file.set_permissions(Permissions::from_mode(mode));
        }
    }

    /// Updates the mode and group of a file that this user created before the store was shared.
    pub(super) fn repair(self, file: &File, seen: &Metadata) {
        self.repair_to(file, seen, self.files);
    }

    /// Updates the mode and group of a directory that this user created before the store was
    /// shared.
    pub(super) fn repair_directory(self, dir: &File, seen: &Metadata) {
        self.repair_to(dir, seen, self.directory_mode());
    }

    fn repair_to(self, file: &File, seen: &Metadata, mode: u32) {
        let others = self.is_of_group() && seen.gid() != self.group;
        if seen.uid() == self.me && (seen.mode() & 0o7777 != mode || others) {
            self.share(file, mode);
        }
    }
}

/// Returns the mode of files in a directory with this mode.
fn files_below(dir: u32) -> u32 {
    let group = if dir & 0o020 != 0 { 0o060 } else { 0 };
    let others = if dir & 0o002 != 0 { 0o006 } else { 0 };
    0o600 | group | others
}

/// User and group that access the files. `None` means the process's own.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Acting(Option<(u32, u32)>);

impl Acting {
    /// Returns the identity to use in the store. Root acts as the owner of the directory, and all
    /// other users as themselves. Returns `None` if root lacks the permission for that.
    pub(super) fn in_store(root: &Metadata) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || root.uid() == 0 {
            return Some(Self(None));
        }
        let acting = Self(Some((root.uid(), root.gid())));
        let now = acting.now();
        // setfsuid only returns the previous value, so an invalid call reads the current one.
        let became = setfsuid(Uid::from_raw(u32::MAX)).as_raw();
        drop(now);
        (became == root.uid()).then_some(acting)
    }

    /// Switches this thread to the acting user and group until the returned guard is dropped.
    pub(super) fn now(self) -> AsOwner {
        let before = self.0.map(|(uid, gid)| {
            let gid = setfsgid(Gid::from_raw(gid));
            (setfsuid(Uid::from_raw(uid)), gid)
        });
        AsOwner { before, _this_thread: PhantomData }
    }
}

/// Guard of [`Acting::now`]. It must stay on its thread, because the change is per thread.
pub(super) struct AsOwner {
    before: Option<(Uid, Gid)>,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for AsOwner {
    fn drop(&mut self) {
        if let Some((uid, gid)) = self.before {
            setfsuid(uid);
            setfsgid(gid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_permissions_follow_those_of_the_directory() {
        assert_eq!(files_below(0o700), 0o600);
        assert_eq!(
            files_below(0o755),
            0o600,
            "claim IDs are secret, so other users must not read them"
        );
        assert_eq!(files_below(0o2775), 0o660);
        assert_eq!(files_below(0o1777), 0o666);
        let private = FilePermissions::private();
        let rights = |files, sticky| FilePermissions { files, sticky, ..private };
        assert_eq!(rights(0o600, true).directory_mode(), 0o700);
        assert_eq!(rights(0o660, false).directory_mode(), 0o2770);
        assert_eq!(rights(0o666, true).directory_mode(), 0o1777);
        assert_eq!(rights(0o660, false).inbox_mode(), 0o620);
    }
}
